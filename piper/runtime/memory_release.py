"""Decides from the plan when memory that has crossed streams returns to the stream that allocated it.

PyTorch's allocator keeps memory by stream. What a stream took goes back to that stream as soon as its last
tensor is gone on the host, and may be written again by the stream's next kernel, though another stream is
still to read it. A plan frees a slot at an instruction that runs after all uses of it. So a slot that is
freed where it was made can go at once. One that is freed on another stream is *parked*: its tensors are held
until the stream that made it is known to run after the free, and then dropped. Mostly that stream comes to
know by the plan's own events. Where it does not, it is made to wait, but not at once: that would hold it up
for a reduction that nothing else waits for. It may begin one more piece of work first, which is the time in
which the other stream is expected to finish. A send ends when its receiver takes the value, however late that
is, so a stream waits for it only when later values are on their way through the same pipe. Nothing is marked
with `record_stream`, which would let memory grow with how far the host runs ahead.
"""

from collections import Counter
from dataclasses import dataclass, field

from piper.ir.ids import SlotId
from piper.plan.clock import StreamClock
from piper.plan.instr import Instr
from piper.plan.memory_timeline import Ledger, allocations
from piper.plan.ops import OPS
from piper.plan.plan import Plan

LAG = 1  # pieces of work that a stream begins before it waits for what another stream has freed
SENDS = 2  # later values in a pipe before a stream waits for one that it has sent


@dataclass(slots=True, kw_only=True)
class Handling:
    """The waits and releases that one instruction does in addition to its plan."""

    waits: list[int] = field(default_factory=list)  # places on other streams that it begins after
    drops: list[SlotId] = field(default_factory=list)  # parked slots that go back before it begins
    frees: list[SlotId] = field(default_factory=list)  # its plan's frees: slots that go back at its end
    parks: list[SlotId] = field(default_factory=list)  # and slots that are held until a later instruction


@dataclass(slots=True, kw_only=True)
class Parked:
    """A freed slot whose memory is held until the stream that made it may reuse it."""

    slot: SlotId
    place: int  # where it was freed
    pipe: str | None = None  # through which it was sent, where a send has freed it
    number: int = 0  # of the values sent through that pipe before
    age: int = 0  # pieces of work that its stream has begun since


class Releases:
    """Walks a plan in the order of issue, with what each stream knows of the others."""

    def __init__(self, plan: Plan) -> None:
        self.clock = StreamClock(ins.stream for ins in plan.instrs)
        self.lane = self.clock.stream_of  # the stream of each place, by number
        self.maker = {slot: self.lane[place] for slot, place in allocations(plan).items()}
        self.parked: list[list[Parked]] = [[] for _ in range(self.clock.count)]  # by their stream
        self.signalled = plan.signallers
        self.sent: Counter[str | None] = Counter()  # values, by their pipe

    def handle(self, place: int, ins: Instr) -> Handling:
        """Return what the next instruction has to do."""
        lane, found, pipe = self.lane[place], Handling(), ins.comm if ins.op == "send" else None
        for event in ins.waits:
            self.clock.learn(lane, self.signalled[event])
        self._unpark(lane, ins, found)
        for slot in ins.frees:
            maker = self.maker[slot]
            if maker == lane:
                found.frees.append(slot)
            else:
                found.parks.append(slot)
                self.parked[maker].append(Parked(slot=slot, place=place, pipe=pipe, number=self.sent[pipe]))
        self.sent[pipe] += 1
        self.clock.issue(place)
        return found

    def _unpark(self, lane: int, ins: Instr, found: Handling) -> None:
        """Drop what this stream knows to be over; wait for what has been parked for long enough."""
        if not self.parked[lane]:
            return
        if works := OPS[ins.op].takes_time:
            late: dict[int, int] = {}  # other stream -> the last place of it to wait for
            for slot in self.parked[lane]:
                other = self.lane[slot.place]
                sends = self.sent[slot.pipe] - slot.number
                due = slot.age >= LAG if slot.pipe is None else sends > SENDS
                if due and not self.clock.knows(lane, slot.place):
                    late[other] = slot.place  # they are in the order of their places
            for place in sorted(late.values()):
                found.waits.append(place)
                self.clock.learn(lane, place)
        left = []
        for slot in self.parked[lane]:
            if self.clock.knows(lane, slot.place):
                found.drops.append(slot.slot)
            else:
                slot.age += works
                left.append(slot)
        self.parked[lane] = left


def releases(plan: Plan) -> list[Handling]:
    """Return what each instruction of a plan does so that memory is freed only when no stream uses it."""
    # Slots that are still parked at the end are freed after the step.
    walk = Releases(plan)
    return [walk.handle(place, ins) for place, ins in enumerate(plan.instrs)]


def predicted_peak(plan: Plan) -> int:
    """Return the most bytes that a device holds in a step: those the plan counts, and those parked."""
    ledger = Ledger(plan)
    peak = ledger.resident
    for ins, handling in zip(plan.instrs, releases(plan), strict=True):
        ledger.release(handling.drops)
        ledger.hold(ins.writes)
        peak = max(peak, ledger.live + ins.workspace)
        ledger.release(handling.frees)
    return peak
