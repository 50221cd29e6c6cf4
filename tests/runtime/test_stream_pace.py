"""How far the host runs ahead of a device: a collective is issued when it can begin soon."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from piper.ir.ids import SlotId
from piper.plan.plan import Plan
from piper.runtime.comm.base import CommError
from piper.runtime.stream_executor import AHEAD, StreamExecutor
from tests.runtime.grid import Cell, compiled
from tests.runtime.replaying import Stream


class SlowDevice:
    """Runs what was issued, in that order: one event comes each time the host looks for one in vain."""

    def __init__(self, ends: float = float("inf")) -> None:
        self.recorded = self.over = self.looks = 0
        self.ends = ends  # events that come at all

    def event(self) -> "SlowEvent":
        return SlowEvent(self)


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device, self.number = device, 0

    def record(self, stream: object = None) -> None:
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self) -> bool:
        device = self.device
        device.looks += 1
        if self.number <= device.over:
            return True
        device.over = int(min(device.over + 1, device.ends))
        return False


Issued = Callable[[int, StreamExecutor], None]  # takes the place of an instruction that is issued


def executor_on(
    device: SlowDevice, monkeypatch: pytest.MonkeyPatch, issued: Issued = lambda place, executor: None
) -> tuple[StreamExecutor, list[str]]:
    """Return an executor on a slow device, and the list of its failures."""
    module = SimpleNamespace(
        Stream=Stream,
        Event=device.event,
        device=lambda _: nullcontext(),
        stream=lambda _: nullcontext(),
        default_stream=Stream,
        current_stream=Stream,
        set_stream=lambda _: None,
    )
    monkeypatch.setattr("piper.runtime.stream_executor.module", lambda _: module)
    plan = compiled(Cell(case="mlp", schedule="1f1b", dp=2, zero=3)).plans.of(2)
    index = index_of(plan)
    failures: list[str] = []

    def note(place: int) -> None:
        issued(place, executor)

    executor: StreamExecutor = StreamExecutor(
        plan,
        [partial(note, place) for place in range(len(plan.instrs))],
        [None] * len(index),
        index,
        device=2,
        accelerator=torch.device("cpu"),
        timeout=0.3,
        on_failure=lambda: failures.append("aborted"),
    )
    return executor, failures


def index_of(plan: Plan) -> dict[SlotId, int]:
    slots = dict.fromkeys(slot for ins in plan.instrs for slot in (*ins.reads, *ins.writes, *ins.frees))
    return {slot: number for number, slot in enumerate(slots)}


def test_a_collective_waits_for_what_was_computed_some_signals_before_and_a_transfer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SlowDevice()
    left: list[int] = []  # signals of computations that had not come when a collective was issued
    looks: set[int] = set()  # for an event before a transfer was issued, since the instruction before it

    def issued(place: int, executor: StreamExecutor) -> None:
        ins = executor.plan.instrs[place]
        if ins.op in ("send", "recv"):
            looks.add(device.looks - looked[-1])
        looked.append(device.looks)
        if ins.comm is not None and ins.op not in ("send", "recv"):
            computed = [at for at, other in enumerate(executor.plan.instrs[:place]) if not other.comm]
            signals = [executor.events[at] for at in computed if executor.plan.instrs[at].signals is not None]
            left.append(sum(signal.number > device.over for signal in signals))  # type: ignore[attr-defined]

    looked = [0]
    executor, _ = executor_on(device, monkeypatch, issued)
    executor.run()
    assert looks == {0}, "transfers are issued at once"
    assert max(left) == AHEAD - 1, "the host is ahead of the device, and no further"
    assert device.over == device.recorded, "the step is over"


def test_a_captured_step_asks_for_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice()
    executor, _ = executor_on(device, monkeypatch)
    executor.enqueue()
    assert device.looks == 0


def test_an_event_that_does_not_come_while_a_step_is_issued_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.runtime.stream_executor.POLL", 0.05)
    places: list[int] = []
    device = SlowDevice(ends=4)
    executor, failures = executor_on(device, monkeypatch, lambda place, _: places.append(place))
    with pytest.raises(CommError, match=r"nothing has moved for 0\.3 s") as raised:
        executor.run()
    assert failures == ["aborted"]
    assert len(places) < len(executor.plan.instrs), "the rest was not issued"
    stuck = next(place for place, event in executor.events.items() if event.number > device.over)  # type: ignore[attr-defined]
    assert raised.value.__notes__ == [f"on device 2, at the arrow:\n{executor.plan.around(stuck)}"]
