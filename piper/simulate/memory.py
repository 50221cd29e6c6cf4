"""The memory of a device over time: a slot is live from its first write to its free."""

from dataclasses import dataclass

from piper.ir.ids import SlotId
from piper.plan.memory_timeline import Ledger
from piper.plan.plan import Plan
from piper.simulate.timeline import Timeline

START, END = 0, 1  # of one instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bytes a device holds over a step, and what it holds at the peak."""

    resident: int  # held between steps
    times: tuple[float, ...]
    live: tuple[int, ...]  # from each time to the next: residents, slots and workspaces
    peak: int
    peak_at: int  # the instruction that starts at the peak
    at_peak: tuple[tuple[str, int], ...]  # largest first


def memory_of(plan: Plan, timeline: Timeline) -> MemoryUse:
    """Count the live bytes over the times of a step.

    At the same time, instructions that end count before instructions that start, but an instruction that
    takes no time still starts before it ends.
    """
    ledger = Ledger(plan)
    running: dict[int, int] = {}  # by instruction: its workspace
    times: list[float] = []
    live: list[int] = []
    peak, peak_at, snapshot = ledger.resident, 0, (set[SlotId](), dict[int, int]())
    for time, kind, place in moments(timeline):
        ins = plan.instrs[place]
        if kind == START:
            ledger.hold(ins.writes)
            running[place] = ins.workspace
        else:
            running.pop(place, None)
            ledger.release(ins.frees)
        now = ledger.live + sum(running.values())
        if now > peak:
            peak, peak_at, snapshot = now, place, (set(ledger.slots), dict(running))
        if times and times[-1] == time:
            live[-1] = now
        else:
            times.append(time)
            live.append(now)
    return MemoryUse(
        resident=ledger.resident,
        times=tuple(times),
        live=tuple(live),
        peak=peak,
        peak_at=peak_at,
        at_peak=sizes_of(plan, *snapshot),
    )


def communicators_of(plan: Plan) -> int:
    """Return how many communicators a device of a plan is part of."""
    return len({ins.comm for ins in plan.instrs if ins.comm is not None})


def moments(timeline: Timeline) -> list[tuple[float, int, int]]:
    """Return every start and end of an instruction, in order of time."""
    found: list[tuple[float, int, int, int]] = []
    for place, span in enumerate(timeline.spans):
        # What takes no time starts and ends in issue order, after ends and before starts of the same time.
        found.append((span.start, 1 if span.end > span.start else 0, place, START))
        found.append((span.end, 0, place, END))
    found.sort()
    return [(time, kind, place) for time, _, place, kind in found]


def sizes_of(plan: Plan, held: set[SlotId], running: dict[int, int]) -> tuple[tuple[str, int], ...]:
    """Return the live slots and workspaces, largest first. A storage that slots share counts once."""
    sizes: dict[str, int] = {name: slot.nbytes for name, slot in plan.residents.items()}
    for name in held:
        sizes[name] = plan.slots[name].nbytes
        sizes.update(plan.slots[name].shares)
    for place, workspace in running.items():
        sizes[f"workspace of {plan.instrs[place].node}"] = workspace
    return tuple(sorted(((n, b) for n, b in sizes.items() if b), key=lambda entry: (-entry[1], entry[0])))
