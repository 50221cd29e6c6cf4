"""Candidates of the search with their bounds, alone or in groups, and the queue that they wait in."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import floor, log

from piper.schedules.grid import Grid
from piper.tuning.bounds import LeastMemory
from piper.tuning.choice import SYNTHESISED, StrategyChoice

AHEAD = 32  # entries of the queue among which processes find candidates to evaluate
CandidateKey = tuple[StrategyChoice, Grid | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """Candidates that differ only in the order of passes, in ZeRO levels and in how devices are numbered."""

    choice: StrategyChoice  # the plainest of them
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One candidate with its bounds."""

    choice: StrategyChoice
    bound: float
    memory: LeastMemory
    grid: Grid | None = None
    tries: int = 0  # syntheses so far
    beyond: tuple[int, ...] = ()  # by rank: bytes that its plans held beyond the limit

    @property
    def open(self) -> bool:
        """Return whether its order is still to be synthesised."""
        return self.choice.schedule == SYNTHESISED and self.grid is None

    @property
    def key(self) -> CandidateKey:
        """Return what tells its evaluation from others: a named schedule has one order."""
        return self.choice, self.grid if self.choice.schedule == SYNTHESISED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A candidate, or a group of them, that was discarded without compiling it."""

    choice: StrategyChoice
    bound: float
    memory: LeastMemory | None = None  # it does not fit; None: its bound is above the best step
    grouped: bool = False  # a whole group, of which `choice` is the plainest
    refused: str = ""  # it cannot be compiled: why


@dataclass(slots=True)
class Queue:
    """Candidates in the order of their bounds.

    Of those whose bounds differ by less than `gap`, microbatch sizes that are recorded already come first,
    then the plainest.
    """

    gap: float
    recorded: Callable[[int], bool]
    entries: list[tuple[float, bool, bool, tuple[object, ...], int, CandidateGroup | Leaf]] = field(
        default_factory=list
    )
    pushed: int = 0

    def extend(self, entries: Iterable[CandidateGroup | Leaf]) -> None:
        """Add candidates."""
        for entry in entries:
            self.pushed += 1
            choice = entry.choice
            level = floor(log(entry.bound) / self.gap) if self.gap and entry.bound else entry.bound
            fresh = not self.recorded(choice.rows)
            item = (level, isinstance(entry, Leaf) and fresh, fresh, choice.key, self.pushed, entry)
            heapq.heappush(self.entries, item)

    def pop(self) -> CandidateGroup | Leaf:
        """Take out the next candidate."""
        return heapq.heappop(self.entries)[-1]

    def upcoming(self, until: float, leaves: Callable[[CandidateGroup], Iterable[Leaf]]) -> Iterator[Leaf]:
        """Yield the next candidates whose bounds are below `until`, in order. The queue stays as it is.

        leaves: expands a group.
        """
        ahead = Queue(self.gap, self.recorded, list(self.entries), self.pushed)
        for _ in range(AHEAD):
            if not ahead.entries:
                return
            entry = ahead.pop()
            if entry.bound >= until:
                return
            if isinstance(entry, Leaf):
                yield entry
            else:
                ahead.extend(leaves(entry))

    def rest(self) -> list[CandidateGroup | Leaf]:
        """Return what is left, in order."""
        return [entry for *_, entry in sorted(self.entries)]


def discarded(entry: CandidateGroup | Leaf) -> Discard:
    """Return the record of a candidate whose bound is above the best step."""
    return Discard(choice=entry.choice, bound=entry.bound, grouped=isinstance(entry, CandidateGroup))
