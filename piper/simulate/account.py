"""Accounts of a device's time: computation, bubbles, and communication that computation does not hide."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from piper.plan.ops import OPS, Op
from piper.plan.plan import Plan
from piper.simulate.timeline import Timeline

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
    for begin, stop in busy[first:]:
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
