"""Runs plans of all devices together, in a random order that streams, events and communicators allow."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans
from tests.lower.symbols import Value, cut

TOGETHER = ("counts", "exchange", "gather", "all_reduce", "reduce_scatter", "total", "broadcast")
Results = tuple[Value, ...]


@dataclass(slots=True)
class Device:
    """One device: its slots, the events of its streams, and how far each stream has come."""

    number: int
    plan: Plan
    lanes: dict[str, list[int]]  # by stream: the places of its instructions
    reached: dict[str, int]
    slots: dict[str, Value]
    counts: list[int]  # the places at which the host will wait, in order
    meetings: dict[
        tuple[str, str, str | None], list[int]
    ]  # where it meets peers, by op, node and communicator
    events: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    ran: Counter[str] = field(default_factory=Counter)  # how often each node computed

    def head(self, stream: str) -> int | None:
        """The next instruction of a stream, once its events have come and the host has issued it."""
        lane, reached = self.lanes[stream], self.reached[stream]
        if reached == len(lane):
            return None
        place = lane[reached]
        if self.counts and self.counts[0] < place:
            return None
        return place if self.events.issuperset(self.plan.instrs[place].waits) else None

    def read(self, ins: Instr) -> list[Value]:
        missing = [slot for slot in ins.reads if slot not in self.slots]
        assert not missing, f"device {self.number}: {ins.op} {ins.node} finds no {missing}"
        return [self.slots[slot] for slot in ins.reads]

    def finish(self, place: int, results: Results) -> None:
        """End an instruction: what it writes, what it frees, and its event."""
        ins = self.plan.instrs[place]
        self.slots.update(zip(ins.writes, results, strict=True))
        for slot in ins.frees:
            del self.slots[slot]
        if ins.signals is not None:
            self.events.add(ins.signals)
        if ins.op == "counts":
            self.counts.remove(place)
        self.done.add(place)
        self.reached[ins.stream] += 1


class Machine:
    """All devices together. What an instruction does is given by operations, by name."""

    def __init__(
        self,
        plans: Plans,
        slots: Callable[[int, Plan], dict[str, Value]],
        alone: Callable[[Device, Instr, list[Value]], Results],
        together: Callable[[list[Device], list[Instr]], list[Results]],
        seed: int,
    ) -> None:
        self.alone, self.together = alone, together
        self.rng = random.Random(seed)
        self.buffered = self.rng.random() < 0.5  # whether a send may end before its receive begins
        self.queues: dict[tuple[str, int], list[Value]] = {}
        self.devices = {n: device(n, plan, slots(n, plan)) for plan in plans for n in plan.devices}
        self.groups: dict[tuple[str, int], tuple[int, ...]] = {}
        self.receivers: dict[tuple[str, int], int] = {}
        for comm in plans.comms.values():
            for group in comm.groups:
                if comm.kind == "pairs":
                    self.receivers[comm.name, group[0]] = group[1]
                else:
                    self.groups.update({(comm.name, number): group for number in group})

    def run(self) -> None:
        """Run everything; nothing may be stuck, and nothing left but what outlives the step."""
        lanes = [(device, stream) for device in self.devices.values() for stream in device.lanes]
        moved = True
        while moved:
            moved = False
            lanes = [(d, s) for d, s in lanes if d.reached[s] < len(d.lanes[s])]
            self.rng.shuffle(lanes)
            most = self.rng.randint(1, 6)  # so that one stream may get far ahead of another
            for device, stream in lanes:
                for _ in range(most):
                    place = device.head(stream)
                    if place is None or not self.step(device, place):
                        break
                    moved = True
        for device in self.devices.values():
            stuck = [place for place in range(len(device.plan.instrs)) if place not in device.done]
            assert not stuck, f"device {device.number} is stuck\n{device.plan.around(stuck[0])}"
            left = set(device.slots) - set(device.plan.residents)
            assert not left, f"device {device.number} keeps {left}"

    def step(self, device: Device, place: int) -> bool:
        """Run an instruction, if its peers are there."""
        ins = device.plan.instrs[place]
        if ins.op in TOGETHER:
            return self.meet(device, ins)
        if ins.op == "send":
            return self.send(device, place, ins)
        if ins.op == "recv":
            queue = self.queues.get((ins.comm or "", device.number))
            if not queue:
                return False
            device.finish(place, (queue.pop(0),))
        else:
            device.finish(place, self.alone(device, ins, device.read(ins)))
        return True

    def meet(self, device: Device, ins: Instr) -> bool:
        """Run a collective on all its members, if they all wait with it."""
        numbers = self.groups[ins.comm, device.number] if ins.comm else (device.number,)
        members = [self.devices[number] for number in numbers]
        places = [place for member in members if (place := waiting(member, ins)) is not None]
        if len(places) < len(members):
            return False
        found = [member.plan.instrs[place] for member, place in zip(members, places, strict=True)]
        for member, place, result in zip(members, places, self.together(members, found), strict=True):
            member.finish(place, result)
        return True

    def send(self, device: Device, place: int, ins: Instr) -> bool:
        """Hand a value over; without a buffer, only to a receiver who is waiting for it."""
        assert ins.comm is not None
        number = self.receivers[ins.comm, device.number]
        queue = self.queues.setdefault((ins.comm, number), [])
        if not self.buffered and (queue or not receives(self.devices[number], ins.comm)):
            return False
        queue.append(cut(device.read(ins)[0], ins.payload))
        device.finish(place, ())
        return True


def device(number: int, plan: Plan, slots: dict[str, Value]) -> Device:
    """A device at the start of a step."""
    lanes: dict[str, list[int]] = {}
    meetings: dict[tuple[str, str, str | None], list[int]] = {}
    for place, ins in enumerate(plan.instrs):
        lanes.setdefault(ins.stream, []).append(place)
        if ins.op in TOGETHER:
            meetings.setdefault((ins.op, ins.node, ins.comm), []).append(place)
    counts = [place for place, ins in enumerate(plan.instrs) if ins.op == "counts"]
    return Device(number, plan, lanes, dict.fromkeys(lanes, 0), slots, counts, meetings)


def waiting(device: Device, ins: Instr) -> int | None:
    """Where a device waits with the same instruction as a peer, if it does."""
    for place in device.meetings.get((ins.op, ins.node, ins.comm), ()):
        if device.head(device.plan.instrs[place].stream) == place:
            return place
    return None


def receives(device: Device, comm: str) -> bool:
    """Whether a device waits for what is sent on a communicator."""
    for stream, lane in device.lanes.items():
        reached = device.reached[stream]
        if reached < len(lane):
            ins = device.plan.instrs[lane[reached]]
            if ins.op == "recv" and ins.comm == comm and device.head(stream) is not None:
                return True
    return False
