"""Finds runs that repeat themselves in a sequence of labels: the layers of a graph, by what its nodes do."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRun:
    """A run of labels in which each equals the one a period later."""

    start: int
    stop: int
    period: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def times(self) -> int:
        """Return how many whole periods it has."""
        return self.length // self.period


def repeated_runs(labels: Sequence[Hashable], periods: Iterable[int]) -> Iterator[RepeatedRun]:
    """Yield the longest runs of two periods or more, period by period.

    >>> [(run.start, run.stop) for run in repeated_runs("abcbcbd", [2])]
    [(1, 6)]
    """
    for period in periods:
        start = 0
        for place in range(len(labels) - period + 1):
            if place < len(labels) - period and labels[place] == labels[place + period]:
                continue
            if place - start >= period:
                yield RepeatedRun(start=start, stop=place + period, period=period)
            start = place + 1
