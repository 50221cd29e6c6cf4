"""Failures at every kind of instruction and during the copy, under many strategies: always the same bits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from piper.checkpoint.save import Copied
from piper.compiler import Program, compile, strategy_of
from piper.directives import Directive, protect
from piper.ir.select import at
from piper.launchers.failures import Watcher
from piper.launchers.inline import launch_inline
from piper.launchers.transport.version_sections import HEAD, SectionWriter
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.protected import survival
from piper.recovery.recovering_run import recovering
from piper.recovery.run_events import Event
from piper.runtime.context import Bound
from piper.runtime.worker import Options
from tests.launchers.sabotage import BrokenError
from tests.recovery.test_protect import held_bytes
from tests.runtime import divided
from tests.runtime.grid import Cell, batches, job, strategy

CELLS = [
    *(Cell(case="mlp", schedule="1f1b", dp=2, zero=zero) for zero in range(4)),
    *(Cell(case="mlp", schedule="1f1b", dp=2, zero=zero, clip=0.3) for zero in range(4)),
    *(Cell(case="convnet", schedule="none", dp=2, zero=zero) for zero in range(4)),
    *(Cell(case="dropout", schedule="zero-bubble", dp=2, zero=zero) for zero in range(4)),
    *(Cell(case="moe", schedule="none", dp=2, zero=zero, ways=2, rows=1) for zero in (0, 1, 2, 3)),
    Cell(case="decoder", schedule="dualpipe-v", dp=1, zero=0, parts=4),
    Cell(case="sum_weight", schedule="interleaved-1f1b", dp=2, zero=1),
    Cell(case="frozen", schedule="none", dp=2, zero=2),
]
MATRIX = (pytest.mark.matrix, pytest.mark.timeout(600))
SLOW = (pytest.mark.slow, pytest.mark.timeout(600))
SHORT = [Cell(case="convnet", schedule="none", dp=2, zero=1)]
COPY = "half a copy"


@dataclass
class Injector:
    """Fails once at the next instruction of a kind, or in the next copy, on a device."""

    armed: tuple[int, str] | None = None

    def fire(self, device: int, what: str) -> None:
        if self.armed == (device, what):
            self.armed = None
            raise BrokenError(what)


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    made, watch, write = Injector(), Watcher.watch, SectionWriter.write

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        def act() -> None:
            made.fire(self.device, ins.op)
            run()

        return watch(self, place, ins, act)

    def written(self: SectionWriter, copied: Copied, text: bytes | None = None) -> None:
        if made.armed == (self.device, COPY):  # it is lost half-way
            HEAD.pack_into(self._memory(64), 0, 0, 10, 10, 0, 0)
        made.fire(self.device, COPY)
        write(self, copied, text)

    monkeypatch.setattr(Watcher, "watch", watched)
    monkeypatch.setattr(SectionWriter, "write", written)
    yield made


def targets(plans: Plans) -> list[tuple[int, str]]:
    """The last device that has an operation, for every operation; and two copies."""
    found: dict[str, int] = {}
    for plan in plans:
        for ins in plan.instrs:
            found[ins.op] = plan.devices[-1]
    ops = {device: {ins.op for ins in plan.instrs} for plan in plans for device in plan.devices}
    devices = [device for device in ops if plans.protection is None or "protect" in ops[device]]
    return [
        *((device, op) for op, device in sorted(found.items())),
        (devices[0], COPY),
        (devices[-1], COPY),
    ]


WAYS: dict[str, list[Directive]] = {
    "between steps": [],
    "by the plan": [protect(at())],
    "copies": [protect(at(), copies=1, apart="device")],
}


DEFAULT = [("between steps", "fp64"), ("by the plan", "bf16")]


def trials() -> Iterator[object]:
    """Yield every cell with every way of copying: a third of them in the matrix, the others slow."""
    for number, cell in enumerate(dict.fromkeys([*SHORT, *CELLS])):
        for place, way in enumerate(WAYS):
            for turn, precision in enumerate(("fp64", "bf16")):
                marks: Sequence[pytest.MarkDecorator] = MATRIX
                if cell in SHORT and (way, precision) in DEFAULT:
                    marks = ()
                elif (2 * place + turn - number) % 3:
                    marks = SLOW
                yield pytest.param(cell, way, precision, marks=marks, id=f"{cell}-{way}-{precision}")


@pytest.mark.parametrize(("cell", "way", "precision"), [*trials()])
def test_a_failure_at_every_instruction(cell: Cell, way: str, precision: str, injector: Injector) -> None:
    scheduler = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=10)
    made = job(cell, precision=precision, scheduler=scheduler)
    program = compile(replace(made, strategy=[*strategy(cell), *WAYS[way]]))
    assert_survives(program, lambda count: batches(cell, count), injector)


DIVIDED = ["tp2", "sp2", "tp2dp2z1", "tp2dp2z3", "tp2pp2", "cp2", "tp2cp2dp2"]


def divided_trials() -> Iterator[object]:
    """Yield every divided model with every way of copying: in the matrix one of each, in turn."""
    for number, name in enumerate(DIVIDED):
        for place, way in enumerate(WAYS):
            yield pytest.param(name, way, marks=SLOW if (number + place) % 3 else MATRIX, id=f"{name}-{way}")


@pytest.mark.parametrize(("name", "way"), [*divided_trials()])
def test_a_failure_at_every_instruction_of_divided_chunks(name: str, way: str, injector: Injector) -> None:
    made = divided.job("decoder", name)
    program = compile(replace(made, strategy=[*strategy_of(made), *WAYS[way]]))
    assert_survives(program, divided.batches, injector)
    if (report := survival(program.plans)) is not None:
        assert report.host_bytes == (2 * held_bytes(program, divided.batches(2)),)


def assert_survives(
    program: Program, batches: Callable[[int], list[dict[str, Tensor]]], injector: Injector
) -> None:
    """Check that failures at every kind of instruction leave the bits of an undisturbed run."""
    aims = targets(program.plans)
    given = batches(len(aims) + 2)
    with launch_inline(program) as run:
        wanted = [run.step(batch) for batch in given]
        state = run.state_dict()
    events: list[Event] = []
    with recovering(program, "inline", Options(), retries=10**6, notify=events.append) as run:
        got = []
        for number, batch in enumerate(given):
            if 0 < number <= len(aims):
                injector.armed = aims[number - 1]
            got.append(run.step(batch))
            if injector.armed is not None and injector.armed[1] == COPY:
                raise AssertionError("the copy did not fail")
        assert got == wanted
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    assert [e.event for e in events] == ["failure", "recovery"] * len(aims), "no step gave another result"
