"""What a device does with its time and its memory in a step, simulated or measured.

Time is computation, bubbles, and communication that computation does not hide. Of memory a slot is live from
its first write to its free.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from piper.plan.memory_timeline import Ledger
from piper.plan.ops import OPS, Op
from piper.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One instruction in time, in seconds from the beginning of the step."""

    start: float
    end: float
    waited: float = 0.0  # for peers of the communication, before `start`


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one or more devices: a span for each instruction of their plan, in the plan's order."""

    devices: Sequence[int]  # all devices of a program where simulated, one where measured
    spans: Sequence[Span]

    @property
    def end(self) -> float:
        """Return when the last instruction ends."""
        return max((span.end for span in self.spans), default=0.0)


Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The time of one device in one step, in seconds: `busy` and `bubble` add up to the whole step."""

    busy: float  # something computes
    bubble: float  # nothing computes
    exposed: Mapping[Op, float]  # the part of the bubble in which a communication is under way, by kind
    communication: Mapping[Op, float]  # all time in which it is under way, hidden or not, by kind
    contention: float = 0.0  # the extra time its communications took because they shared links

    @property
    def rate(self) -> float:
        """Return the bubble as a fraction of the step."""
        step = self.busy + self.bubble
        return self.bubble / step if step else 0.0


def account_of(plan: Plan, timeline: Timeline, step: float, contention: float = 0.0) -> Account:
    """Add up one device's step.

    Time in which several communications are under way and nothing computes counts for the one that began
    first. Copies of offloaded values count as communications.
    """
    rows = [(OPS[ins.op], ins.op, span) for ins, span in zip(plan.instrs, timeline.spans, strict=True)]
    busy = merged((span.start, span.end) for known, _, span in rows if known.takes == "device")
    talking = sorted(
        (span.start, span.end, op)
        for known, op, span in rows
        if (known.communicates or (known.host and known.hands_on)) and span.end > span.start
    )
    exposed: dict[Op, float] = {}
    total: dict[Op, float] = {}
    reached = 0.0
    for start, end, op in talking:
        total[op] = total.get(op, 0.0) + end - start
        fresh = max(start, reached)
        if end > fresh:
            exposed[op] = exposed.get(op, 0.0) + uncovered(fresh, end, busy)
            reached = end
    working = sum(end - start for start, end in busy)
    return Account(
        busy=working,
        bubble=max(0.0, step - working),
        exposed={op: seconds for op, seconds in exposed.items() if seconds > 0},
        communication=total,
        contention=contention,
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order of time, with those that touch or overlap joined."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def uncovered(start: float, end: float, busy: Sequence[Interval]) -> float:
    """Return how much of the interval from `start` to `end` lies outside the sorted intervals `busy`."""
    first = bisect_right(busy, start, key=itemgetter(1))  # that ends after the interval begins
    left = end - start
    for place in range(first, len(busy)):  # not a copy of the rest, of which few are looked at
        begin, stop = busy[place]
        if begin >= end:
            break
        left -= min(stop, end) - max(begin, start)
    return max(0.0, left)


def mean_seconds(
    accounts: Sequence[Account], weights: Iterable[int] | None = None
) -> tuple[float, float, float]:
    """Return the mean seconds of computing, of exposed communication, and of the rest of the step."""
    rows = list(zip(accounts, weights or [1] * len(accounts), strict=True))
    total = sum(weight for _, weight in rows)
    busy = sum(weight * account.busy for account, weight in rows) / total
    exposed = sum(weight * sum(account.exposed.values()) for account, weight in rows) / total
    bubble = sum(weight * account.bubble for account, weight in rows) / total
    return busy, exposed, bubble - exposed


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
    """Count the live bytes over the times of a step."""
    ledger, order = Ledger(plan), moments(timeline)
    times: list[float] = []
    live: list[int] = []
    peak, peak_at, last = ledger.resident, 0, 0
    for number, (time, kind, place) in enumerate(order, 1):
        now = ledger.start(place) if kind == START else ledger.end(place)
        if now > peak:
            peak, peak_at, last = now, place, number
        if times and times[-1] == time:
            live[-1] = now
        else:
            times.append(time)
            live.append(now)
    at_peak = Ledger(plan)  # filled a second time: a copy at each new peak would take quadratic time
    for _, kind, place in order[:last]:
        (at_peak.start if kind == START else at_peak.end)(place)
    return MemoryUse(
        resident=ledger.resident,
        times=tuple(times),
        live=tuple(live),
        peak=peak,
        peak_at=peak_at,
        at_peak=at_peak.sizes(),
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
