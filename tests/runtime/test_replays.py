"""A step that is replayed does what it does when it is issued one by one; torch.cuda is played on the host."""

from collections.abc import Iterable, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from piper.checkpoint.load import read_state
from piper.checkpoint.metadata import read_record
from piper.checkpoint.storage import CheckpointReader
from piper.compiler import Program, compile
from piper.directives import split
from piper.errors import ConfigError
from piper.ir.ids import TOTAL
from piper.ir.select import at
from piper.plan.ops import Op
from piper.run.launch import launch_inline
from piper.runtime.comm.synthetic import AloneComms, arriving
from piper.runtime.cuda.graphs import WARM, GraphExecutor, Intake, Kernel
from piper.runtime.kernels import KERNELS
from piper.runtime.setup import Initial, setup_of
from piper.runtime.stream_executor import StreamExecutor
from piper.runtime.worker import Options, Worker
from piper.workers.single_rank import synthetic_weights
from tests.runtime import test_expert_blocks
from tests.runtime.grid import Cell, batches, job
from tests.runtime.replaying import Graph, pretend

ONE = [
    Cell(case="mlp", schedule="none", parts=4, clip=0.3),
    Cell(case="sum_weight", schedule="none", parts=2, rows=4, clip=0.3),
    Cell(case="convnet", schedule="none", parts=2),  # buffers that every part writes
]
RANKS = [
    Cell(case="mlp", schedule="1f1b", dp=2, zero=3, parts=4, clip=0.3),
    Cell(case="convnet", schedule="zero-bubble", dp=2, zero=1),  # gathered in place, after the update
]


def adamw(params: Iterable[Tensor]) -> Optimizer:
    return AdamW(params, lr=2**-7, fused=True)


def falling(optimizer: Optimizer) -> LRScheduler:
    """Rates that single precision holds as they are."""
    return LambdaLR(optimizer, lambda step: 1 - step / 16)


def program_of(cell: Cell, **changes: object) -> Program:
    asked: dict[str, object] = {"optimizer": adamw, "scheduler": falling, "precision": "fp32"}
    return compile(job(cell, **(asked | changes)))


def on_one_device(cell: Cell, **changes: object) -> Program:
    return program_of(cell, strategy=[split(at(), parts=cell.parts)], **changes)


KERNELS_ALONE: Mapping[Op, Kernel] = {**KERNELS, "recv": arriving}


def plain(program: Program, device: int = 0, initial: Initial | None = None) -> Worker:
    comms = AloneComms(program.plans.comms, device)
    initial = initial or synthetic_weights(program.job, program.outline)
    return Worker(setup_of(program), device, comms, initial, Options(streams=False), kernels=KERNELS_ALONE)


def replaying(
    program: Program, device: int = 0, initial: Initial | None = None
) -> tuple[Worker, GraphExecutor]:
    """A worker whose steps are a graph, after the first few."""
    worker, intake = plain(program, device, initial), Intake()
    env, kernels = worker.env, intake.kernels(KERNELS_ALONE)
    inner = StreamExecutor(
        env.plan,
        [intake.watch(i, ins, kernels[ins.op](env, ins)) for i, ins in enumerate(env.plan.instrs)],
        env.slots,
        env.index,
        device=device,
        outro=worker._fetch,
        accelerator=worker.setup.device,
        home=torch.cuda.Stream(),
    )
    overflows = program.plans.places.get("overflows")
    undone = None if overflows is None else (env.at(TOTAL), overflows.start)
    worker.executor = GraphExecutor(inner, intake, [env.at(slot) for slot in env.plan.residents], undone)
    return worker, worker.executor


def replays(executor: GraphExecutor) -> int:
    return cast(Graph, executor.graph).replays


def held(worker: Worker) -> dict[str, Tensor]:
    """All that a worker has after a step: what it trains, what it computes with, and buffers."""
    found = {name: worker.owned(name) for name in worker.env.state.holdings}
    found |= {f"{name}.flat": holding.flat for name, holding in worker.env.state.holdings.items()}
    return found | worker.buffers(worker.env.state.buffers)


def assert_alike(one: Worker, other: Worker) -> None:
    wanted = held(other)
    assert [name for name, value in held(one).items() if not torch.equal(value, wanted[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cell", ONE, ids=str)
def test_one_device(cell: Cell, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr("piper.runtime.device_state.PORTION", 100)  # in bf16, an update of several steps
    program = on_one_device(cell, precision=precision)
    one, (other, executor) = plain(program), replaying(program)
    for batch in batches(cell, 6):
        assert other.step(batch) == one.step(batch)
        assert_alike(other, one)
    assert replays(executor) == 6 - WARM


@pytest.mark.parametrize("cell", RANKS, ids=str)
def test_one_rank_of_a_pipeline(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    program = program_of(cell)
    for plan in program.plans:
        one, (other, executor) = plain(program, plan.devices[-1]), replaying(program, plan.devices[-1])
        for batch in batches(cell, 6):
            assert other.step(batch) == one.step(batch)
            assert_alike(other, one)
        assert replays(executor) == 6 - WARM


def test_rows_that_exceed_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    program = test_expert_blocks.program(
        [*test_expert_blocks.blocks(2), test_expert_blocks.MICROBATCHES], optimizer=adamw
    )
    torch.manual_seed(0)
    drawn = test_expert_blocks.Mixture().state_dict().__getitem__
    one, (other, executor) = plain(program, 0, drawn), replaying(program, 0, drawn)
    repeated = []
    for batch in test_expert_blocks.batches(8):
        sums = one.step(batch)
        assert other.step(batch) == sums
        assert_alike(other, one)
        repeated.append(sums.repeated)
    assert any(repeated[WARM:]) and not all(repeated[WARM:])
    assert replays(executor) == 8 - WARM


def test_a_checkpoint_is_loaded_after_the_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = ONE[2]
    program, given = on_one_device(cell), batches(cell, 5)
    with launch_inline(program) as run:
        for batch in given[:2]:
            run.step(batch)
        run.save(tmp_path / "step-2")
    pretend(monkeypatch)
    one, (other, executor) = plain(program), replaying(program)
    for batch in given:
        other.step(batch)
    assert executor.graph is not None
    reader = CheckpointReader(tmp_path / "step-2", read_record(tmp_path / "step-2"))
    for worker in (one, other):
        for adopt in read_state(worker, reader):
            adopt()
    assert executor.graph is None
    for batch in given:
        assert other.step(batch) == one.step(batch)
    assert_alike(other, one)
    assert replays(executor) == len(given) - WARM


def test_settings_that_a_graph_keeps_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    cell = ONE[0]
    program, (batch,) = on_one_device(cell, optimizer=lambda p: SGD(p, lr=0.5, fused=True)), batches(cell, 1)
    one, (other, executor) = plain(program), replaying(program)
    for step in range(8):
        for worker in (one, other):
            assert worker.env.state.optimizer is not None
            if (
                step == 4
            ):  # it has no momentum yet: made while it is captured, it would be made in every replay
                worker.env.state.optimizer.param_groups[0]["momentum"] = 0.5
        assert other.step(batch) == one.step(batch)
    assert_alike(other, one)
    assert replays(executor) == 4 - WARM


def test_what_needs_the_host_is_named_when_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    cell = ONE[0]
    worker, executor = replaying(on_one_device(cell, optimizer=SGD))  # not fused: its rate becomes a number
    (batch,) = batches(cell, 1)
    for _ in range(WARM):
        worker.step(batch)
    with pytest.raises(ConfigError) as caught:
        worker.step(batch)
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  update[@0] needs the host: operation not permitted when stream is capturing
          hint: leave graphs out: every instruction is then issued by itself
    """)
    assert executor.graph is None
    assert not executor.intake.capturing
