"""The proof that plans can run: over all devices together, before anything starts.

- Every send meets its receive, every collective its peers, in the same order on each communicator.
- There is one global order in which every device issues its instructions, communication being one event on all its
  devices: so nothing can wait in a circle, whatever the streams and however the communicators buffer.
- Every slot is written before it is read, freed exactly once, and every stream that used it is known to be done.

A device's plan stands for all devices that share it. That loses nothing: a circle among devices is also a circle
among the plans they share.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from piper.plan.instr import COMMUNICATION, Instr
from piper.plan.plan import Comm, Plan, Plans

MOST_PROBLEMS = 20


class ProofError(AssertionError):
    """Plans that cannot be proven: a bug of the compiler, or plans that were edited by hand."""


def prove(plans: Plans) -> None:
    """Raise ProofError with a counterexample unless the plans can run."""
    problems = list(problems_of(plans))
    if problems:
        raise ProofError("the plans cannot be proven:\n" + "\n".join(problems[:MOST_PROBLEMS]))


def problems_of(plans: Plans) -> Iterator[str]:
    """Everything that is wrong, most telling first."""
    for plan in plans:
        yield from slot_problems(plan)
    mismatches = list(match_problems(plans))
    yield from mismatches
    if not mismatches:  # a circle is only meaningful between events that do meet
        yield from circle_problems(plans)


@dataclass(slots=True)
class Use:
    """Who has touched a slot: the last place of each stream, and where it was written and freed."""

    written: int = -1
    freed: int = -1
    touched: dict[str, int] = field(default_factory=dict)


def slot_problems(plan: Plan) -> Iterator[str]:
    """Slots read too early, freed too early, twice or never; waits for events that nobody signalled."""
    uses: dict[str, Use] = {}
    signalled: dict[int, tuple[str, int, dict[str, int]]] = {}
    known: dict[str, dict[str, int]] = {}
    for place, ins in enumerate(plan.instrs):
        mine = known.setdefault(ins.stream, {})
        for event in ins.waits:
            if event not in signalled:
                yield f"{ins.node}: waits for event {event}, which nothing before it signals\n{plan.around(place)}"
                continue
            stream, when, seen = signalled[event]
            for other, reached in (*seen.items(), (stream, when)):
                if mine.get(other, -1) < reached:
                    mine[other] = reached
        yield from use_problems(plan, place, ins, mine, uses)
        mine[ins.stream] = place
        if ins.signals is not None:
            signalled[ins.signals] = (ins.stream, place, dict(mine))
    for slot, use in uses.items():
        if use.freed < 0 and slot not in plan.residents:
            yield f"{slot} is never freed, last written by\n{plan.around(use.written)}"


def use_problems(
    plan: Plan, place: int, ins: Instr, known: dict[str, int], uses: dict[str, Use]
) -> Iterator[str]:
    """What one instruction does wrong with its slots."""
    for slot in ins.reads:
        use = uses.get(slot)
        if slot in plan.residents and use is None:
            use = uses[slot] = Use()
        elif use is None:
            yield f"{ins.node} reads {slot}, which nothing has written\n{plan.around(place)}"
            continue
        if use.freed >= 0:
            yield f"{ins.node} reads {slot}, freed at {use.freed}\n{plan.around(place)}"
        elif use.written >= 0 and not follows(plan, use.written, ins, known):
            yield f"{ins.node} reads {slot} without waiting for who writes it, at {use.written}\n{plan.around(place)}"
        use.touched[ins.stream] = place
    for slot in ins.writes:
        use = uses.setdefault(slot, Use())
        if use.freed >= 0:
            yield f"{ins.node} writes {slot}, freed at {use.freed}\n{plan.around(place)}"
        for stream, when in use.touched.items():
            if stream != ins.stream and known.get(stream, -1) < when:
                yield f"{ins.node} writes {slot} while {plan.instrs[when].node} may still use it\n{plan.around(place)}"
        use.written = place
        use.touched[ins.stream] = place
    for slot in ins.frees:
        use = uses.setdefault(slot, Use())
        if slot in plan.residents or use.freed >= 0 or use.written < 0:
            yield f"{ins.node} frees {slot}, which it must not\n{plan.around(place)}"
        for stream, when in use.touched.items():
            if stream != ins.stream and known.get(stream, -1) < when:
                yield f"{ins.node} frees {slot} while {plan.instrs[when].node} may still use it\n{plan.around(place)}"
        use.freed = place


def follows(plan: Plan, before: int, ins: Instr, known: dict[str, int]) -> bool:
    """Whether an instruction is known to run after an earlier one."""
    stream = plan.instrs[before].stream
    return stream == ins.stream or known.get(stream, -1) >= before


def match_problems(plans: Plans) -> Iterator[str]:
    """Communicators whose members do not issue the same operations in the same order, on one stream each."""
    number = {device: i for i, plan in enumerate(plans) for device in plan.devices}
    issued: dict[str, dict[int, list[Instr]]] = {}
    for i, plan in enumerate(plans):
        for ins in plan.instrs:
            if ins.comm is not None:
                issued.setdefault(ins.comm, {}).setdefault(i, []).append(ins)
            elif ins.op in ("send", "recv", "counts", "exchange"):
                yield f"{ins.node}: {ins.op} without a communicator"
    for name, by_plan in issued.items():
        comm = plans.comms.get(name)
        if comm is None:
            yield f"there is no communicator {name}"
            continue
        members = {tuple(number.get(device, -1) for device in group) for group in comm.groups}
        reachable = {i for group in members for i in group}
        for i in by_plan:
            if i not in reachable:
                yield f"devices {plans.plans[i].devices} use {name} but are not in it"
        for group in sorted(members):
            yield from group_problems(plans, comm, group, by_plan)


def group_problems(
    plans: Plans, comm: Comm, group: tuple[int, ...], by_plan: dict[int, list[Instr]]
) -> Iterator[str]:
    """Whether the plans of one group agree on what they do together."""
    if comm.kind == "pairs":
        sender, receiver = group
        left = [ins for ins in by_plan.get(sender, []) if ins.op == "send"]
        right = [ins for ins in by_plan.get(receiver, []) if ins.op == "recv"]
        lists = [(sender, left), (receiver, right)]
    else:
        lists = [(i, by_plan.get(i, [])) for i in dict.fromkeys(group)]
    first, expected = lists[0]
    for other, found in lists[1:]:
        for step in range(max(len(expected), len(found))):
            a = signature(expected[step]) if step < len(expected) else "nothing"
            b = signature(found[step]) if step < len(found) else "nothing"
            if a != b:
                yield (
                    f"on {comm.name} the {step + 1}. operation differs: devices {plans.plans[first].devices[:4]} do {a}, "
                    f"devices {plans.plans[other].devices[:4]} do {b}"
                )
                break


def signature(ins: Instr) -> str:
    """What both sides of a communication must agree on."""
    op = "transfer" if ins.op in ("send", "recv") else ins.op
    size = (
        f"{ins.nbytes} bytes" if ins.op in ("send", "recv", "all_reduce", "gather", "reduce_scatter") else ""
    )
    return f"{op} {ins.node} {size}".rstrip()


def circle_problems(plans: Plans) -> Iterator[str]:
    """A circle of instructions that each wait for another, or nothing: then one global order exists."""
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
    followers: list[list[int]] = [[] for _ in names]
    waiting = [0] * len(names)
    for row in rows:
        for a, b in zip(row, row[1:], strict=False):
            if a != b:  # a send and a receive of one transfer on one device
                followers[a].append(b)
                waiting[b] += 1
    ready = deque(i for i, count in enumerate(waiting) if not count)
    done = 0
    while ready:
        a = ready.popleft()
        done += 1
        for b in followers[a]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    if done < len(names):
        circle = shortest_circle(followers, {i for i, count in enumerate(waiting) if count})
        yield "these wait for each other in a circle:\n" + "\n".join(f"  {names[i]}" for i in circle)


def shortest_circle(followers: list[list[int]], stuck: set[int]) -> list[int]:
    """The shortest circle through one of the first stuck vertices."""
    best: list[int] = []
    for start in sorted(stuck)[:64]:
        came = {start: -1}
        frontier = deque([start])
        found = -1
        while frontier and found < 0:
            a = frontier.popleft()
            for b in followers[a]:
                if b == start:
                    found = a
                    break
                if b in stuck and b not in came:
                    came[b] = a
                    frontier.append(b)
        if found >= 0:
            path = [found]
            while path[-1] != start:
                path.append(came[path[-1]])
            if not best or len(path) < len(best):
                best = path[::-1]
    return best
