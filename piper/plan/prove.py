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

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from piper.plan.instr import Instr
from piper.plan.ops import COMMUNICATION, OPS
from piper.plan.plan import Comm, Plans
from piper.plan.protected import protection_problems
from piper.plan.slots import SlotProof

MOST_PROBLEMS = 20
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
        for step in range(max(len(expected), len(issued))):
            a = signature(expected[step]) if step < len(expected) else "nothing"
            b = signature(issued[step]) if step < len(issued) else "nothing"
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
    names, rows = events_of(plans)
    followers: list[list[int]] = [[] for _ in names]
    for row in rows:
        for a, b in pairwise(row):
            if a != b:  # a send and a receive of one transfer on one device
                followers[a].append(b)
    _, stuck = in_order(followers)
    if stuck:
        circle = shortest_circle(followers, stuck)
        yield "these wait for each other in a circle:\n" + "\n".join(f"  {names[i]}" for i in circle)


def in_order(followers: Sequence[Sequence[int]]) -> tuple[list[int], set[int]]:
    """Return the vertices in topological order, and those that wait for a cycle."""
    waiting = [0] * len(followers)
    for vertices in followers:
        for vertex in vertices:
            waiting[vertex] += 1
    order = [vertex for vertex, count in enumerate(waiting) if not count]
    for vertex in order:  # the loop appends to it
        for after in followers[vertex]:
            waiting[after] -= 1
            if not waiting[after]:
                order.append(after)
    return order, {vertex for vertex, count in enumerate(waiting) if count}


def events_of(plans: Plans) -> tuple[list[str], list[list[int]]]:
    """Return the names of all events, and the order of events in each plan.

    A communication is one event for all its members.
    """
    vertex: dict[tuple[object, ...], int] = {}
    names: list[str] = []
    rows: list[list[int]] = []
    for i, plan in enumerate(plans):
        row: list[int] = []
        for place, ins in enumerate(plan.instrs):
            key: tuple[object, ...] = (ins.node, ins.comm) if ins.op in COMMUNICATION else (i, place)
            if key not in vertex:
                vertex[key] = len(names)
                names.append(f"{ins.op} {ins.node} on {plan.devices[0]}")
            row.append(vertex[key])
        rows.append(row)
    return names, rows


def shortest_circle(followers: list[list[int]], stuck: set[int]) -> list[int]:
    """Return the shortest cycle through a vertex of some cycle that is cheap to find."""
    before: dict[int, list[int]] = {}  # each stuck vertex waits for another: going back leads into a cycle
    for a in stuck:
        for b in followers[a]:
            if b in stuck:
                before.setdefault(b, []).append(a)
    walked: dict[int, None] = {}
    at = min(stuck)
    while at not in walked:
        walked[at] = None
        at = before[at][-1]
    places = list(walked)
    starts = places[places.index(at) :][:SEARCHED]
    return min((shortest_path(followers, a, before[a], stuck, len(stuck)) for a in starts), key=len)


def shortest_path(
    followers: Sequence[Sequence[int]], start: int, goals: Collection[int], among: set[int], limit: int
) -> list[int]:
    """Return the shortest path from a vertex to one of the goals, empty if none has at most `limit` edges."""
    came = {start: -1}
    frontier = [start]
    while frontier and limit >= 0:
        if (goal := next((a for a in frontier if a in goals), None)) is not None:
            path = [goal]
            while path[-1] != start:
                path.append(came[path[-1]])
            return path[::-1]
        limit -= 1
        following: list[int] = []
        for a in frontier:
            for b in followers[a]:
                if b in among and b not in came:
                    came[b] = a
                    following.append(b)
        frontier = following
    return []
