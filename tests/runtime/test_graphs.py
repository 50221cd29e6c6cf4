"""Steps as one graph, as far as it can be decided without a GPU: which can be, and what the host still does."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import cleandoc
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from piper.compiler import Program, compile
from piper.directives import split
from piper.directives.shard import Shard
from piper.errors import ConfigError
from piper.ir.chunk import Chunk
from piper.ir.ids import Pass
from piper.ir.select import at
from piper.plan.instr import Instr
from piper.plan.plan import Plan
from piper.run.launch import by_host, launch
from piper.runtime import compute
from piper.runtime.comm.inline import World
from piper.runtime.cuda.graph_checks import (
    check_static,
    moved_by,
    optimizer_reasons,
    settings,
    static_reasons,
)
from piper.runtime.cuda.graphs import WARM, GraphExecutor, Intake, Rates, put_back
from piper.runtime.device_state import fuse
from piper.runtime.kernels import KERNELS
from piper.runtime.setup import Setup, initial_tensors, setup_of
from piper.runtime.stream_executor import StreamExecutor
from piper.runtime.worker import Options, Worker
from tests.runtime import divided
from tests.runtime.grid import Cell, batches, compiled, job, strategy

DENSE = Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, clip=0.3)
DRAWS = Cell(case="dropout", schedule="1f1b")
EXPERTS = Cell(case="moe", schedule="1f1b", dp=2, ways=2)
WHOLE_EXPERTS = Cell(case="moe", schedule="1f1b", dp=2)


def number() -> list[Tensor]:
    return [torch.zeros(1, requires_grad=True)]


def on_cuda(cell: Cell) -> Setup:
    """What a worker with a GPU would be given, on a machine without one."""
    return replace(setup_of(compiled(cell)), device=torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("cell", "reasons"),
    [
        (DENSE, []),
        (Cell(case="convnet", schedule="1f1b"), []),  # buffers are copied back
        (DRAWS, ["PP=0: the host sets the seed of random numbers again in every step"]),
        (
            EXPERTS,
            [
                "PP=0 EP=0: how many rows go to each device is known only while it runs; shard(..., capacity=) fixes it"
            ],
        ),
        (WHOLE_EXPERTS, ["PP=0 EP=0: one product for all experts takes bf16 and widths that 8 divides"]),
    ],
    ids=str,
)
def test_what_of_a_plan_needs_the_host(cell: Cell, reasons: list[str]) -> None:
    program = compiled(cell)
    chunks = {chunk.name: chunk for chunk in program.outline.chunks}
    assert static_reasons(program.plans.of(0), chunks) == reasons


def test_experts_that_one_kernel_multiplies_need_no_host() -> None:
    program = compile(job(WHOLE_EXPERTS, precision="bf16"), device="cpu")
    chunks = {chunk.name: chunk for chunk in program.outline.chunks}
    assert any(chunk.kind == "expert" for chunk in chunks.values())
    assert not any(static_reasons(plan, chunks) for plan in program.plans)


def on_cuda_in_blocks(capacity: float, optimizer: Callable[[Iterable[Tensor]], Optimizer]) -> Setup:
    changed = [
        replace(each, capacity=capacity) if isinstance(each, Shard) else each for each in strategy(EXPERTS)
    ]
    asked = job(EXPERTS, strategy=changed, precision="bf16", optimizer=optimizer)
    return replace(setup_of(compile(asked, device="cpu")), device=torch.device("cuda", 0))


def test_experts_over_several_devices_whose_rows_travel_in_blocks_need_no_host() -> None:
    for capacity, optimizer in ((1.5, AdamW), (2, NAdam)):
        setup = on_cuda_in_blocks(capacity, optimizer)
        check_static(setup, setup.plans, by_host=False)


def test_an_optimizer_that_cannot_skip_a_step() -> None:
    setup = on_cuda_in_blocks(1.5, NAdam)
    with pytest.raises(ConfigError) as caught:
        check_static(setup, setup.plans, by_host=False)
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  NAdam cannot skip a step in which rows exceed their blocks: no fused kernel does it
          hint: leave graphs out: every instruction is then issued by itself
    """)


def test_many_chunks_are_not_all_named() -> None:
    names = [f"PP={i}" for i in range(5)]
    instrs = tuple(
        Instr(op="compute", node=f"F[{name}]", stream="compute", payload=Pass(phase="F", chunk=name))
        for name in names
    )
    plan = Plan(devices=(0,), instrs=instrs, slots={}, residents={})
    (reason,) = static_reasons(plan, {name: Chunk(name=name, tags=(), random=True) for name in names})
    assert (
        reason == "PP=0, PP=1, PP=2, and 2 more: the host sets the seed of random numbers again in every step"
    )


def test_a_device_without_graphs_and_options_that_look_into_a_step() -> None:
    with pytest.raises(ConfigError) as caught, launch(compiled(DENSE), graphs=True, profile=2):
        pass
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  device cpu has no graphs
                profile (--profile) looks at single instructions
          hint: leave graphs out: every instruction is then issued by itself
    """)


def test_every_reason_is_told_once() -> None:
    setup = on_cuda(DRAWS)
    with pytest.raises(ConfigError) as caught:
        check_static(setup, setup.plans, Options(keep_outputs=True).looks, by_host=True)
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  keep_outputs (--detect-nan) looks at single instructions
                values go from device to device through the host
                PP=0: the host sets the seed of random numbers again in every step
                PP=1: the host sets the seed of random numbers again in every step
          hint: leave graphs out: every instruction is then issued by itself
    """)


def test_a_static_step_is_let_through() -> None:
    setup = on_cuda(DENSE)
    check_static(setup, setup.plans, by_host=False)
    silent = [
        replace(plan, instrs=tuple(ins for ins in plan.instrs if ins.comm is None)) for plan in setup.plans
    ]
    check_static(setup, silent, by_host=True)  # there is nobody to hand a value to


def test_who_hands_values_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    four = replace(compiled(DENSE), device="cuda")
    two = replace(compiled(Cell(case="mlp", schedule="1f1b")), device="cuda")
    found = {on: (by_host(four, on), by_host(two, on)) for on in ("inline", "local", "ray", "rank:0")}
    assert found == {
        "inline": (True, True),
        "local": (True, False),
        "ray": (False, False),
        "rank:0": (False, False),
    }


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (lambda p: AdamW(p), []),
        (lambda p: AdamW(p, foreach=True), []),
        (lambda p: NAdam(p), []),
        (lambda p: SGD(p, momentum=0.9), []),
        (lambda p: SGD(p, foreach=True), ["SGD reads its learning rate on the host unless it is fused"]),
        (lambda p: Adagrad(p), ["Adagrad has no `capturable`: it computes on the host"]),
        (
            lambda p: AdamW(p, differentiable=True),
            ["AdamW is differentiable: nothing of it is done in place"],
        ),
    ],
)
def test_which_optimizers_can_be_captured(
    make: Callable[[Iterable[Tensor]], Optimizer], reasons: list[str]
) -> None:
    optimizer = make(number())
    fuse(optimizer)
    assert optimizer_reasons(optimizer) == reasons


@pytest.mark.parametrize(
    ("make", "moved"),
    [
        (lambda o: StepLR(o, 1), []),
        (lambda o: OneCycleLR(o, 0.1, total_steps=10), ["betas"]),
        (lambda o: OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False), []),
    ],
)
def test_what_a_scheduler_changes_beside_the_rate(
    make: Callable[[Optimizer], LRScheduler], moved: list[str]
) -> None:
    optimizer = AdamW(number())
    assert moved_by(make(optimizer), optimizer) == moved


def test_an_optimizer_that_looks_at_the_names_of_parameters() -> None:
    def by_name(named_params: Iterable[tuple[str, Tensor]]) -> Optimizer:
        weights = [value for name, value in named_params if name.endswith("weight")]
        return SGD(weights, lr=0.1, foreach=True)

    setup = replace(on_cuda(DENSE), optimizer=cast(Callable[[Iterable[Tensor]], Optimizer], by_name))
    with pytest.raises(ConfigError, match="SGD reads its learning rate on the host unless it is fused"):
        check_static(setup, setup.plans, by_host=False)


def test_a_scheduler_that_a_graph_does_not_follow() -> None:
    setup = replace(on_cuda(DENSE), scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=10))
    with pytest.raises(ConfigError) as caught:
        check_static(setup, setup.plans, by_host=False)
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  OneCycleLR changes betas: a graph follows the learning rate alone
          hint: leave graphs out: every instruction is then issued by itself
    """)


def test_an_instruction_that_cannot_be_captured() -> None:
    intake = Intake()
    errors = [RuntimeError("operation not permitted when stream is capturing\nmore"), ValueError("other")]

    def fail() -> None:
        raise errors[0]

    run = intake.watch(0, Instr(op="compute", node="F[PP=0]", stream="compute"), fail)
    with pytest.raises(RuntimeError, match="not permitted"):
        run()
    intake.capturing = True
    with pytest.raises(ConfigError) as caught:
        run()
    assert str(caught.value) == cleandoc("""
        graphs: a step of this job cannot be issued as one graph
          why:  F[PP=0] needs the host: operation not permitted when stream is capturing
          hint: leave graphs out: every instruction is then issued by itself
    """)
    errors[0] = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        run()


@pytest.mark.parametrize("cell", [DENSE, Cell(case="mlp", schedule="none", parts=4, dp=3)], ids=str)
def test_rows_come_by_static_memory_as_without(cell: Cell) -> None:
    same_loads(compiled(cell), batches(cell, 2))


def test_slices_of_rows_come_by_static_memory_as_without() -> None:
    """A field that is sharded along its sequence is loaded in slices."""
    same_loads(compile(divided.job("decoder", "cp2zigzag"), device="cpu"), divided.batches(2))


def same_loads(program: Program, given: list[dict[str, Tensor]]) -> None:
    setup, world = setup_of(program), World(program.plans, 5.0)
    for device in sorted(device for plan in program.plans for device in plan.devices):
        worker = Worker(setup, device, world.member(device), initial_tensors(program).__getitem__, Options())
        env = worker.env
        loads = [ins for ins in env.plan.instrs if ins.op == "load"]
        intake = Intake()
        bound = [(compute.load(env, ins), intake.load(env, ins), env.at(ins.writes[0])) for ins in loads]
        for batch in given:
            env.batch = batch
            intake.fill()
            for plain, static, slot in bound:
                plain()
                wanted = cast(Tensor, env.slots[slot])
                static()
                got = cast(Tensor, env.slots[slot])
                assert got.dtype == wanted.dtype
                assert torch.equal(got, wanted)
        worker.close()


def test_rates_reach_the_optimizer_and_leave_it_as_it_was() -> None:
    def halved(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 0.5**step)

    cell = Cell(case="mlp", schedule="none", parts=2, clip=0.3)
    program = compile(
        job(
            cell,
            strategy=[split(at(), parts=2)],
            optimizer=lambda params: SGD(params, lr=0.25, momentum=0.5),
            scheduler=halved,
        )
    )
    setup, results = setup_of(program), []
    for intake in (None, Intake()):
        kernels = KERNELS if intake is None else intake.kernels(KERNELS)
        member = World(program.plans, 5.0).member(0)
        worker = Worker(setup, 0, member, initial_tensors(program).__getitem__, Options(), kernels=kernels)
        told = []
        for batch in batches(cell, 4):
            if intake is not None:
                worker.env.batch = batch
                intake.fill()
            told.append(worker.step(batch))
        optimizer = worker.env.state.optimizer
        assert optimizer is not None
        assert optimizer.param_groups[0]["lr"] == 0.25 * 0.5**4  # a number, as a scheduler left it
        results.append((told, {name: worker.owned(name).clone() for name in program.plans.buckets}))
        worker.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def test_rates_are_those_of_each_group() -> None:
    one, other = number(), number()
    optimizer = SGD([{"params": one, "lr": 0.5}, {"params": other, "lr": 0.25}])
    rates = Rates(optimizer, torch.device("cpu"))
    rates.fill()
    with rates.lent():
        lent = [group["lr"] for group in optimizer.param_groups]
        assert [(rate.item(), rate.dtype, rate.dim()) for rate in lent] == [
            (0.5, torch.float32, 0),
            (0.25, torch.float32, 0),
        ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_what_was_replaced_is_copied_back() -> None:
    kept, replaced, left = torch.zeros(2), torch.zeros(3), torch.zeros(1)
    slots: list[object] = [kept, torch.ones(3), None, torch.ones(1), left]
    put_back(slots, {0: kept, 1: replaced, 2: None, 4: left})
    assert slots[0] is kept
    assert slots[1] is replaced
    assert torch.equal(replaced, torch.ones(3))
    assert slots[2] is None
    assert torch.equal(cast(Tensor, slots[3]), torch.ones(1))


class Never(StreamExecutor):
    def __init__(self) -> None:
        """Nothing of it is used."""


def test_steps_are_issued_one_by_one_until_nothing_changes() -> None:
    optimizer = SGD(number(), lr=0.5, momentum=0.5)
    intake = Intake()
    intake.rates.append(Rates(optimizer, torch.device("cpu")))
    executor = GraphExecutor(Never(), intake, ())
    assert [executor.due() for _ in range(WARM + 2)] == [False] * WARM + [True] * 2
    optimizer.param_groups[0]["lr"] = 0.25  # a graph reads it
    assert executor.due()
    optimizer.param_groups[0]["momentum"] = 0.25  # and has kept this
    assert [executor.due() for _ in range(WARM + 1)] == [False] * WARM + [True]
    executor.reset()
    assert [executor.due() for _ in range(WARM + 1)] == [False] * WARM + [True]
    assert "lr" not in settings(optimizer)[0]
