"""Activations on the host between forward and backward: the bits of a run that keeps them, in less memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.directives import Directive, offload, remat, shard, split
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.launchers.inline import launch_inline
from piper.plan.memory_timeline import host_peak, timeline
from piper.runtime.debug.check import check
from piper.runtime.host_copies import HostCopy
from piper.runtime.host_memory import HostMemory
from piper.runtime.worker import Options
from piper.schedules import gpipe
from tests.runtime.grid import SHAPES, Cell, batches, job, strategy
from tests.runtime.test_reruns import Noisy, Opaque, Run

AWAY = offload(at(), least_mb=0)
FEW = [
    Cell(case="mlp", schedule="gpipe", dp=2, zero=3, parts=4, rows=1, clip=0.3),
    Cell(case="mlp", schedule="zbv", parts=4, rows=1),
]


def programs(cell: Cell, *more: Directive) -> tuple[Program, Program]:
    """A program that offloads, and the same without."""
    kept = [*strategy(cell), *more]
    away, kept_job = job(cell, strategy=[*kept, AWAY]), job(cell, strategy=kept)
    return compile(away, device="cpu"), compile(kept_job, device="cpu")


def left(program: Program, given: list[dict[str, Tensor]]) -> list[Tensor]:
    """The losses of some steps, and the gradients and parameters that they leave."""
    with launch_inline(program, Options(keep_gradients=True)) as run:
        losses = [torch.tensor(run.step(batch).loss) for batch in given]
        return [*losses, *run.gradients().values(), *run.state_dict().values()]


def same_bits(away: Program, kept: Program, given: list[dict[str, Tensor]]) -> None:
    assert any(ins.op == "fetch" for plan in away.plans for ins in plan.instrs)
    for one, other in zip(left(away, given), left(kept, given), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cell", FEW, ids=str)
def test_the_bits_of_a_run_that_keeps_them(cell: Cell) -> None:
    same_bits(*programs(cell), batches(cell, 2))


def test_live_bytes_are_as_planned_and_buffers_are_used_again() -> None:
    cell = replace(FEW[0], parts=6, zero=1)
    away, kept = programs(cell)
    with launch_inline(away, Options(measure=True)) as run:
        for batch in batches(cell, 2):
            run.step(batch)
        for worker in (run.workers[0], run.workers[1]):  # the stage without the loss, in which scalars share
            plan = worker.env.plan
            foreseen = timeline(plan)
            pairs = zip(foreseen.live, plan.instrs, strict=True)
            assert worker.meter is not None
            assert worker.meter.live == [live - foreseen.resident - ins.workspace for live, ins in pairs]
            held = sum(size * len(idle) for size, idle in worker.env.host_memory.idle.items())
            assert held == host_peak(plan) > 0  # the second step took no more
            assert not any(isinstance(value, HostCopy) for value in worker.env.slots)
    assert timeline(away.plans.of(0)).peak < timeline(kept.plans.of(0)).peak


def test_a_buffer_goes_to_the_next_of_its_size() -> None:
    memory, cpu = HostMemory(), torch.device("cpu")
    first, second = memory.take(8, cpu), memory.take(8, cpu)
    assert first is not second
    memory.give(first, cpu)
    memory.give(second, cpu)
    assert memory.take(8, cpu) is first  # the one that was read longest ago
    assert memory.take(4, cpu).data.shape == (4,)


def test_what_eager_autograd_saves_stays() -> None:
    run = Run(model=Opaque, schedule="gpipe", budget=1, again=False)
    asked = replace(run.job(), strategy=[*run.strategy(), AWAY])
    program = compile(asked, device="cpu")
    moved = {
        name for plan in program.plans for ins in plan.instrs for name in ins.reads if ins.op == "offload"
    }
    assert {(name.kind, name.owner) for name in moved} == {
        ("output", "PP=0 LAYER=1"),  # as the second stage has received it
        ("saved", "PP=1 LAYER=2"),
    }
    only = replace(run.job(), strategy=[*run.strategy(), offload(at(LAYER=1), least_mb=0)])
    with pytest.raises(ScheduleError, match="nothing that these regions save can be offloaded"):
        compile(only, device="cpu")
    same_bits(program, compile(run.job(), device="cpu"), run.batches())


LEVELS = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]
MANY = [
    *(
        Cell(case="mlp", schedule=schedule, dp=dp, zero=zero, parts=8, rows=1, clip=0.3)
        for number, schedule in enumerate([*(name for name in SHAPES if name != "none"), "dualpipe"])
        for dp, zero in (LEVELS[number % 5], LEVELS[(number + 2) % 5])
    ),
    Cell(case="moe", schedule="zbv", dp=2, zero=3, ways=2, parts=4),
    Cell(case="encoder_decoder", schedule="gpipe", parts=4, clip=0.3),
    Cell(case="convnet", schedule="gpipe", dp=2, parts=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("cell", MANY, ids=str)
def test_every_schedule_and_level_has_the_numbers_of_one_device(cell: Cell, again: bool) -> None:
    more = [remat(at(), 1, across="PP")] if again else []
    try:
        away, kept = programs(cell, *more)
    except ScheduleError as error:
        said = ("is read again too soon", "uses buffers that change")
        assert any(words in str(error) for words in said), error
        return
    report = check(away, launch_inline, batches(cell, 2))
    assert report.ok, report
    same_bits(away, kept, batches(cell, 2))


@pytest.mark.slow
def test_dropout_draws_the_same_numbers() -> None:
    run = Run(model=Noisy, schedule="gpipe", dp=2, zero=2, again=False, budget=1)
    away = compile(replace(run.job(), strategy=[*run.strategy(), AWAY]), device="cpu")
    same_bits(away, compile(run.job(), device="cpu"), run.batches())


@pytest.mark.slow
def test_a_divided_region() -> None:
    run = Run(schedule="gpipe", again=False, budget=1)
    weights = {"*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up": 0, "*attention.out|*ffn.down": 1}
    pairs = [range(2 * stage, 2 * stage + 2) for stage in range(2)]
    divided = [shard(at(PP=i), devices, axis="TP", weights=weights) for i, devices in enumerate(pairs)]
    kept = [*divided, split(at(), parts=4), *gpipe(2, 4)]
    away = compile(replace(run.job(), strategy=[*kept, AWAY]), device="cpu")
    same_bits(away, compile(replace(run.job(), strategy=kept), device="cpu"), run.batches())
    assert check(away, launch_inline, run.batches()).ok
