"""Activations on the host between forward and backward: the bits of a run that keeps them, in less memory."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.check.check import check
from piper.compiler import Program, compile
from piper.directives import Directive, offload, place, protect, remat, shard, split
from piper.errors import ScheduleError
from piper.ir.ids import SlotId
from piper.ir.select import at
from piper.job import Job
from piper.plan.memory_timeline import host_peak, timeline
from piper.run.launch import launch_inline
from piper.runtime.bucket_state import HostMemory
from piper.runtime.host_copies import TensorCopy
from piper.runtime.worker import Options, Worker
from piper.schedules import gpipe, zbv
from piper.workers.transport.versions import Versions
from tests.runtime.grid import SHAPES, Cell, batches, job, strategy
from tests.runtime.inline_workers import workers_of
from tests.runtime.memory_meter import measured, meter_of, planned_bytes
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
    with measured(), launch_inline(away, Options()) as run:
        for batch in batches(cell, 2):
            run.step(batch)
        for worker in (
            workers_of(run)[0],
            workers_of(run)[1],
        ):  # the stage without the loss, in which scalars share
            plan = worker.env.plan
            assert meter_of(worker).live == planned_bytes(worker)
            held = sum(size * len(idle) for size, idle in worker.env.host_memory.idle.items())
            assert held == host_peak(plan) > 0  # the second step took no more
            values = [
                item for slot in worker.env.slots for item in (slot if isinstance(slot, list) else [slot])
            ]
            assert not any(isinstance(value, TensorCopy) for value in values)
    assert timeline(away.plans.of(0)).peak < timeline(kept.plans.of(0)).peak


class Skipping(nn.Module):
    """Four stages in a V. The last one reads what the first returned, whose memory the first saves too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x))
                x = x * outputs[0] if len(outputs) == 3 else x
                outputs.append(x)
        return x


def test_memory_on_the_host_stays_until_its_last_value_is_back() -> None:
    """The first stage's output is fetched once, what it saves in the same memory twice."""
    draw = torch.Generator().manual_seed(0)
    given = [{"x": torch.randn(4, 16, generator=draw)} for _ in range(2)]
    places = [place(at(PP=stage), [device]) for stage, device in enumerate((0, 1, 1, 0))]
    kept = [*places, split(at(), parts=4), *zbv(2, 4)]
    asked = Job(
        model=Skipping,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: given,
        strategy=[*kept, offload(at(), least_mb=0)],
    )
    away = compile(asked, device="cpu")
    fetched = [name for ins in away.plans.of(0).instrs if ins.op == "fetch" for name in ins.writes]
    assert any("fetched1" in str(name) for name in fetched)
    same_bits(away, compile(replace(asked, strategy=kept), device="cpu"), given)
    with launch_inline(away, Options(streams=False)) as run:  # in issue order
        for batch in given:
            run.step(batch)
        idle = workers_of(run)[0].env.host_memory.idle
        assert sum(size * len(free) for size, free in idle.items()) == host_peak(away.plans.of(0))


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


STATE = offload(at(), what="optimizer")


@pytest.mark.parametrize("precision", [pytest.param("fp64", marks=pytest.mark.slow), "bf16"])
def test_optimizer_state_on_the_host_has_the_same_bits(precision: str, tmp_path: Path) -> None:
    """Parameters and moments are equal to the bit, also after a checkpoint is loaded, and lie on the host."""
    cell = Cell(case="mlp", schedule="gpipe", dp=2, zero=3, rows=1, clip=0.3)
    jobs = [job(cell, strategy=[*strategy(cell), *more], precision=precision) for more in ([STATE], [])]
    found = []
    for number, made in enumerate(jobs):
        program, given = compile(made, device="cpu"), batches(cell, 4)
        with launch_inline(program) as run:
            losses = [run.step(batch).loss for batch in given[:2]]
            run.save(tmp_path / f"{number}")
        with launch_inline(program) as run:  # both from the first one's checkpoint
            run.load(tmp_path / "0")
            losses += [run.step(batch).loss for batch in given[2:]]
            found.append((losses, run.state_dict(), run.optimizer_state("exp_avg_sq")))
            if not number:
                check_away(workers_of(run).values(), precision)
    (losses, *states), (wanted, *others) = found
    assert losses == wanted
    for one, other in zip(states, others, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def check_away(workers: Iterable[Worker], precision: str) -> None:
    """What the optimizer keeps lies in buffers of the host, and nothing of it in the slots of the step."""
    for worker in workers:
        for name, away in worker.env.state.away.items():
            keys = {key for _, key in away.buffers}
            assert keys == {"exp_avg", "exp_avg_sq"}
            optimizer = worker.env.state.optimizer
            assert optimizer is not None
            for number, tensor in enumerate(away.segments):
                for key in keys:
                    assert optimizer.state[tensor][key] is away.buffers[number, key][1]
            assert (away.master is not None) == (precision == "bf16")
            assert away.here is None
            assert worker.env.plan.residents[SlotId("state", name)].nbytes == 0


def test_an_optimizer_that_is_not_torchs_own_is_refused() -> None:
    class Counting(torch.optim.SGD):
        """Counts its steps for all parameters together."""

    cell = Cell(case="mlp", schedule="none", parts=1)
    asked = job(
        cell, strategy=[*strategy(cell), STATE], optimizer=lambda p: Counting(p, lr=0.1, momentum=0.9)
    )
    with pytest.raises(ScheduleError, match="the state of Counting cannot be offloaded"):
        compile(asked, device="cpu")
    plain = job(cell, strategy=[*strategy(cell), STATE], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ScheduleError, match="there is no optimizer state to offload"):
        compile(plain, device="cpu")


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
@pytest.mark.parametrize("cell", MANY[::3], ids=str)
def test_state_and_activations_together_have_the_numbers_of_one_device(cell: Cell) -> None:
    near = cell.schedule == "1f1b"  # of two stages: there is nothing to offload but state
    asked = [*strategy(cell), STATE, *([] if near else [AWAY])]
    program = compile(job(cell, strategy=asked), device="cpu")
    report = check(program, launch_inline, batches(cell, 2))
    assert report.ok, report


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


@pytest.mark.slow
@pytest.mark.parametrize("by_the_plan", [True, False], ids=["protect", "between steps"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_versions_hold_state_that_is_on_the_host(precision: str, by_the_plan: bool) -> None:
    cell = Cell(case="mlp", schedule="gpipe", dp=2, zero=1, parts=4, rows=1, clip=0.3)
    asked = [*strategy(cell), STATE, AWAY, *([protect(at())] if by_the_plan else [])]
    program, given = compile(job(cell, strategy=asked, precision=precision), device="cpu"), batches(cell, 5)
    versions = Versions(program.plans)
    with closing(versions):
        run = launch_inline(program, Options(), versions.files)
        with closing(run):
            run.session.protect()
            for batch in given[:4]:
                run.step(batch)
            newest = versions.newest()
            assert newest is not None
            wanted = [run.step(batch) for batch in given[4:]]
            state, unread = run.state_dict(), dict(run.session.unread)
        newest = versions.newest()
        assert newest is not None
        again = launch_inline(program, Options(), versions.files)
        with closing(again):
            again.session.protect()
            again.session.restore(newest, unread)
            got = [again.step(batch) for batch in given[newest:]]
            assert got[-1:] == wanted[-1:] or newest == 5
            assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
