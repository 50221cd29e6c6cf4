"""The proof that plans can run: over all devices together, before anything starts.

- Every send meets its receive, every collective its peers, in the same order on each communicator, which
  each device uses on one stream.
- There is one global order in which every device issues its instructions, communication being one event on
  all its devices: so nothing can wait in a circle, whatever the streams and however communicators buffer.
- Every slot is written before it is read, freed exactly once, and then every stream is done with it.
- Where plans protect the state, everything that a step writes is copied before, and each machine that may be
  lost leaves copies of every element.
- Whole parameters and whole gradients are not made before those issued earlier have been given back.

A device's plan stands for all devices that share it. That loses nothing: a circle among devices is also a
circle among the plans they share.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

from piper.ir.grouping import grouped
from piper.ir.ids import SlotId
from piper.plan.instr import Instr
from piper.plan.ops import OPS, Op
from piper.plan.plan import Comm, Plan, Plans
from piper.plan.protected import protection_problems

MOST_PROBLEMS = 20
Event = list[tuple[int, int]]  # the programs and places of an instruction, or of a communication of several
SEARCHED = 64  # stuck events from which the shortest cycle is searched


class ProofError(AssertionError):
    """Plans that cannot be proven: a bug of the compiler, or plans that were edited by hand."""


def prove(plans: Plans) -> None:
    """Raise ProofError with a counterexample unless the plans can run."""
    problems = list(problems_of(plans))
    if problems:
        raise ProofError("the plans cannot be proven:\n" + "\n".join(problems[:MOST_PROBLEMS]))


def problems_of(plans: Plans) -> Iterator[str]:
    """Yield every problem of the plans, the most telling first."""
    for plan in plans:
        yield from SlotProof(plan).run()
    yield from protection_problems(plans)
    mismatches = list(match_problems(plans))
    yield from mismatches
    if not mismatches:  # cycles only mean something between events that match
        yield from circle_problems(plans)


def match_problems(plans: Plans) -> Iterator[str]:
    """Yield communicators whose members do not issue the same operations in the same order on one stream."""
    number = {device: i for i, plan in enumerate(plans) for device in plan.devices}
    issued: dict[str, dict[int, list[Instr]]] = {}
    for i, plan in enumerate(plans):
        for ins in plan.instrs:
            if ins.comm is not None:
                issued.setdefault(ins.comm, {}).setdefault(i, []).append(ins)
            elif OPS[ins.op].communicates and not OPS[ins.op].may_be_alone:
                yield f"{ins.node}: {ins.op} without a communicator"
    for name, by_plan in issued.items():
        comm = plans.comms.get(name)
        if comm is None:
            yield f"there is no communicator {name}"
            continue
        yield from member_problems(plans, comm, by_plan)
        for group in sorted({tuple(number.get(device, -1) for device in group) for group in comm.groups}):
            yield from group_problems(plans, comm, group, by_plan)


def member_problems(plans: Plans, comm: Comm, by_plan: dict[int, list[Instr]]) -> Iterator[str]:
    """Yield devices that use a communicator they do not belong to, or use it on two streams."""
    roles: dict[str, set[int]] = {"send": set(), "recv": set(), "any": set()}
    for group in comm.groups:
        roles["any"].update(group)
        roles["send"].add(group[0])
        roles["recv"].add(group[-1])
    for i, instrs in by_plan.items():
        streams: dict[str, str] = {}
        for ins in instrs:
            role: str = ins.op if comm.kind == "pairs" and ins.op in roles else "any"
            if streams.setdefault(role, ins.stream) != ins.stream:
                yield f"{comm.name} is used on two streams, {streams[role]} and {ins.stream}, by {ins.node}"
                break
        for role in streams:
            outside = [device for device in plans.plans[i].devices if device not in roles[role]]
            if outside:
                yield f"device {outside[0]} uses {comm.name} but is not in it"


def group_problems(
    plans: Plans, comm: Comm, group: tuple[int, ...], by_plan: dict[int, list[Instr]]
) -> Iterator[str]:
    """Yield the operations on which the plans of one group disagree."""
    if comm.kind == "pairs":
        sender, receiver = group
        left = [ins for ins in by_plan.get(sender, []) if ins.op == "send"]
        right = [ins for ins in by_plan.get(receiver, []) if ins.op == "recv"]
        lists = [(sender, left), (receiver, right)]
    else:
        lists = [(i, by_plan.get(i, [])) for i in dict.fromkeys(group)]
    first, expected = lists[0]
    for other, issued in lists[1:]:
        pairs = zip_longest(map(signature, expected), map(signature, issued), fillvalue="nothing")
        for step, (a, b) in enumerate(pairs):
            if a != b:
                here, there = plans.plans[first].devices[0], plans.plans[other].devices[0]
                yield f"on {comm.name}, operation {step}: device {here} does {a}, device {there} does {b}"
                break


def signature(ins: Instr) -> str:
    """Return what both sides of a communication must agree on."""
    operation = OPS[ins.op]
    return f"{operation.name} {ins.node}" + (f" of {ins.nbytes} bytes" if operation.agrees_on_size else "")


def circle_problems(plans: Plans) -> Iterator[str]:
    """Yield a cycle of instructions that wait for each other. Without one, a global order exists."""
    events, followers = events_of(plans)
    _, stuck = in_order(followers)
    if stuck:
        circle = (events[event][0] for event in shortest_circle(followers, stuck))
        waiting = ((plans.plans[program], place) for program, place in circle)
        shown = [f"  {p.instrs[i].op} {p.instrs[i].node} on {p.devices[0]}" for p, i in waiting]
        yield "\n".join(["these wait for each other in a circle:", *shown])


def number_before(followers: Sequence[Sequence[int]]) -> list[int]:
    """Return how many vertices each one waits for."""
    counts = Counter(vertex for vertices in followers for vertex in vertices)
    return [counts[vertex] for vertex in range(len(followers))]


def in_order(followers: Sequence[Sequence[int]]) -> tuple[list[int], set[int]]:
    """Return the vertices in topological order, and those that wait for a cycle."""
    waiting = number_before(followers)
    order = [vertex for vertex, count in enumerate(waiting) if not count]
    for vertex in order:  # the loop appends to it
        for after in followers[vertex]:
            waiting[after] -= 1
            if not waiting[after]:
                order.append(after)
    return order, {vertex for vertex, count in enumerate(waiting) if count}


def events_of(plans: Plans) -> tuple[list[Event], list[list[int]]]:
    """Return the events of all programs, and the numbers of those that follow each of them in a program."""
    vertex: dict[tuple[str, str, int], int] = {}  # a communication has the same number for all its members
    events: list[Event] = []
    followers: list[list[int]] = []
    for program, plan in enumerate(plans):
        before, issued = -1, Counter[tuple[object, ...]]()
        for place, ins in enumerate(plan.instrs):
            event = len(events)
            if ins.comm is not None:
                issued[ins.op, ins.node, ins.comm] += 1
                event = vertex.setdefault((ins.node, ins.comm, issued[ins.op, ins.node, ins.comm]), event)
            if event == len(events):
                events.append([])
                followers.append([])
            events[event].append((program, place))
            if event != before >= 0:  # else a send and a receive of one transfer on one device
                followers[before].append(event)
            before = event
    return events, followers


def shortest_circle(followers: list[list[int]], stuck: set[int]) -> list[int]:
    """Return the shortest cycle through a vertex of some cycle that is cheap to find."""
    # Each stuck vertex waits for another: going back leads into a cycle.
    before = grouped((b, a) for a in stuck for b in followers[a] if b in stuck)
    walked: dict[int, None] = {}
    at = min(stuck)
    while at not in walked:
        walked[at] = None
        at = before[at][-1]
    places = list(walked)
    starts = places[places.index(at) :][:SEARCHED]
    return min((shortest_path(followers, a, before[a], stuck) for a in starts), key=len)


def shortest_path(
    followers: Sequence[Sequence[int]], start: int, goals: Collection[int], among: set[int]
) -> list[int]:
    """Return the shortest path from a vertex to one of the goals, of which it reaches one."""
    came = {start: -1}
    frontier = [start]
    while frontier:
        if (goal := next((a for a in frontier if a in goals), None)) is not None:
            path = [goal]
            while path[-1] != start:
                path.append(came[path[-1]])
            return path[::-1]
        following: list[int] = []
        for a in frontier:
            for b in followers[a]:
                if b in among and b not in came:
                    came[b] = a
                    following.append(b)
        frontier = following
    raise AssertionError("no goal can be reached")


Reach = dict[str, int]  # stream -> the last of its instructions that is known to be over


class SlotProof:
    """Walks a plan in issue order, with what each stream knows of the others by the events it waited for.

    It shares no code with `StreamClock`, by which plans get their events: a proof must not repeat a mistake.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self._known: dict[str, Reach] = {}  # by stream
        self._signalled: dict[int, tuple[str, int, Reach]] = {}  # event -> stream, place, what it knew then
        self._written: dict[SlotId, int] = {}
        self._freed: dict[SlotId, int] = {}
        self._touched: dict[SlotId, Reach] = {}  # slot or shared storage -> the last use by each stream
        self._sharers: dict[SlotId, int] = {}  # storage -> how many live slots share it
        self._shares = {name: [s for s, _ in slot.shares] for name, slot in plan.slots.items() if slot.shares}
        self._scattered = {slot for ins in plan.instrs if ins.op == "reduce_scatter" for slot in ins.reads}
        paced: tuple[Op, ...] = ("compute", "update", "reduce_scatter", "offload")
        self._last: dict[Op, Reach] = {op: {} for op in paced}  # of each stream, so far
        self._receives_after = receives_after(plan)

    def run(self) -> list[str]:
        """Return every problem of the plan, in issue order."""
        for place, ins in enumerate(self.plan.instrs):
            mine = self._known.setdefault(ins.stream, {})
            self._wait(place, ins, mine)
            self._pace(place, ins, mine)
            for slot in ins.reads:
                self._read(place, ins, slot, mine)
            for slot in ins.writes:
                self._write(place, ins, slot, mine)
            for slot in ins.frees:
                self._free(place, ins, slot, mine)
            mine[ins.stream] = place
            if ins.op in self._last:
                self._last[ins.op][ins.stream] = place
            if ins.signals is not None:
                if ins.signals in self._signalled:
                    self._complain(place, f"signals event {ins.signals}, which is signalled already")
                self._signalled[ins.signals] = (ins.stream, place, dict(mine))
        for slot, place in self._written.items():
            if slot not in self._freed and slot not in self.plan.residents:
                self._complain(place, f"writes {slot}, which is never freed")
        return self.problems

    def _complain(self, place: int, what: str) -> None:
        self.problems.append(f"{self.plan.instrs[place].node} {what}\n{self.plan.around(place)}")

    def _wait(self, place: int, ins: Instr, mine: Reach) -> None:
        for event in ins.waits:
            if event not in self._signalled:
                self._complain(place, f"waits for event {event}, which nothing before it signals")
                continue
            stream, when, seen = self._signalled[event]
            for other, reached in (*seen.items(), (stream, when)):
                if mine.get(other, -1) < reached:
                    mine[other] = reached

    def _pace(self, place: int, ins: Instr, mine: Reach) -> None:
        """Complain about an instruction that allocates before those issued earlier free their memory."""
        if ins.op in ("compute", "update"):
            self._check_over(place, ins, "offload", mine)
        if ins.op == "fetch":
            self._check_over(place, ins, "update", mine)
        whole = ins.op == "gather" and not self.plan.slots.keys().isdisjoint(ins.writes)
        if whole or ins.op == "fetch":
            self._check_over(place, ins, "compute", mine)
        fresh = (slot for slot in ins.writes if slot not in ins.reads)
        if ins.op == "compute" and not self._scattered.isdisjoint(fresh):
            self._check_over(place, ins, "reduce_scatter", mine)
        when = self._receives_after.get(place, -1)
        if when >= 0 and mine.get(self.plan.instrs[when].stream, -1) < when:
            self._complain(place, f"may take multiprocessors from {self.plan.instrs[when].node}")

    def _check_over(self, place: int, ins: Instr, op: Op, mine: Reach) -> None:
        for stream, when in self._last[op].items():
            if stream != ins.stream and mine.get(stream, -1) < when:
                self._complain(place, f"may run ahead of {self.plan.instrs[when].node} and fill the memory")

    def _read(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self._freed:
            self._complain(place, f"reads {slot}, freed at {self._freed[slot]}")
        elif slot in self._written:
            writer = self._written[slot]
            stream = self.plan.instrs[writer].stream
            if stream != ins.stream and mine.get(stream, -1) < writer:
                self._complain(place, f"reads {slot} without waiting for who writes it, at {writer}")
        elif slot not in self.plan.residents:
            self._complain(place, f"reads {slot}, which nothing has written")
        self._touch(place, ins, slot)

    def _write(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self._freed:
            self._complain(place, f"writes {slot}, freed at {self._freed[slot]}")
        elif slot not in self.plan.slots and slot not in self.plan.residents:
            self._complain(place, f"writes {slot}, which has no size")
        self._check_done(place, ins, slot, mine, f"writes {slot}")
        for storage in self._shares.get(slot, ()) if slot not in self._written else ():
            self._sharers[storage] = self._sharers.get(storage, 0) + 1
        self._written[slot] = place
        self._touch(place, ins, slot)

    def _free(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self.plan.residents:
            self._complain(place, f"frees {slot}, which outlives the step")
        elif slot in self._freed:
            self._complain(place, f"frees {slot}, freed at {self._freed[slot]}")
        elif slot not in self._written:
            self._complain(place, f"frees {slot}, which nothing has written")
        else:
            self._check_done(place, ins, slot, mine, f"frees {slot}")
            for storage in self._shares.get(slot, ()):
                self._sharers[storage] -= 1
                if not self._sharers[storage]:
                    self._check_done(place, ins, storage, mine, f"frees {storage}")
            self._freed[slot] = place

    def _touch(self, place: int, ins: Instr, slot: SlotId) -> None:
        for touched in (slot, *self._shares.get(slot, ())):
            self._touched.setdefault(touched, {})[ins.stream] = place

    def _check_done(self, place: int, ins: Instr, slot: SlotId, mine: Reach, what: str) -> None:
        """Complain about every other stream that used a slot and is not known to be done with it."""
        for stream, when in self._touched.get(slot, {}).items():
            if stream != ins.stream and mine.get(stream, -1) < when:
                self._complain(place, f"{what} while {self.plan.instrs[when].node} may still use it")


def receives_after(plan: Plan) -> dict[int, int]:
    """Return, for each receive, the computation that is over when it begins."""
    # It is the last one issued before it, but for the one right before the first reader, which it overlaps.
    computes = [place for place, ins in enumerate(plan.instrs) if ins.op == "compute"]
    first_read: dict[SlotId, int] = {}
    after: dict[int, int] = {}
    for place in reversed(range(len(plan.instrs))):
        ins = plan.instrs[place]
        if ins.op == "recv":
            read = min((first_read[slot] for slot in ins.writes if slot in first_read), default=None)
            overlapped = bisect_left(computes, len(plan.instrs) if read is None else read) - 1
            last = min(bisect_left(computes, place) - 1, overlapped - 1)
            if last >= 0:
                after[place] = computes[last]
        for slot in ins.reads:
            first_read[slot] = place
    return after
