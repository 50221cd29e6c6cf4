"""Failures at every kind of instruction and during the copy, under many strategies: always the same bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from piper.compiler import compile
from piper.launchers.failures import Watcher
from piper.launchers.inline import launch_inline
from piper.launchers.transport.versions import HEAD, VersionWriter
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.recovery.recovering_run import recovering
from piper.recovery.run_events import Event
from piper.runtime.context import Bound
from piper.runtime.worker import Options
from tests.launchers.sabotage import BrokenError
from tests.runtime.grid import Cell, batches, job

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
MATRIX = (pytest.mark.matrix, pytest.mark.timeout(300))
SHORT = [Cell(case="convnet", schedule="none", dp=2, zero=1)]
PROTECT = "protect"


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
    made, watch, write = Injector(), Watcher.watch, VersionWriter.write

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        def act() -> None:
            made.fire(self.device, ins.op)
            run()

        return watch(self, place, ins, act)

    def written(self: VersionWriter) -> None:
        if made.armed == (self.worker.device, PROTECT):  # it is lost half-way
            memory = self._memory(self.worker.env.step % 2, 64)
            HEAD.pack_into(memory, 0, 0, 10, 10)
        made.fire(self.worker.device, PROTECT)
        write(self)

    monkeypatch.setattr(Watcher, "watch", watched)
    monkeypatch.setattr(VersionWriter, "write", written)
    yield made


def targets(plans: Plans) -> list[tuple[int, str]]:
    """The last device that has an operation, for every operation; and two copies."""
    found: dict[str, int] = {}
    for plan in plans:
        for ins in plan.instrs:
            found[ins.op] = plan.devices[-1]
    devices = [device for plan in plans for device in plan.devices]
    return [
        *((device, op) for op, device in sorted(found.items())),
        (devices[0], PROTECT),
        (devices[-1], PROTECT),
    ]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize(
    "cell",
    [*SHORT, *(pytest.param(cell, marks=MATRIX) for cell in CELLS if cell not in SHORT)],
    ids=str,
)
def test_a_failure_at_every_instruction(cell: Cell, precision: str, injector: Injector) -> None:
    scheduler = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=10)
    program = compile(job(cell, precision=precision, scheduler=scheduler))
    aims = targets(program.plans)
    given = batches(cell, len(aims) + 2)
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
            if injector.armed is not None and injector.armed[1] == PROTECT:
                raise AssertionError("the copy did not fail")
        assert got == wanted
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    assert [e.event for e in events] == ["failure", "recovery"] * len(aims), "no step gave another result"
