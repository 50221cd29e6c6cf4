"""Shorter steps of a strategy: the first microbatches in the same order.

A pipeline repeats itself once it is full, and a single rank repeats itself from the second microbatch on. So
the time of a step with many microbatches is extrapolated from two shorter steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives import Directive
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.ir.select import At
from piper.tuning.choice import split_of

FEWEST = 2  # microbatches of the shorter step
STEADY = 8  # a pipeline of so many ranks needs one more microbatch to show how it repeats itself


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """The microbatches of a step, and of the two shorter ones that it is extrapolated from."""

    few: int
    more: int
    whole: int

    @property
    def simulated(self) -> tuple[int, int]:
        """Return the microbatches of the shorter steps."""
        return self.few, self.more

    @property
    def beyond(self) -> float:
        """Return how often the difference of the shorter steps comes on top of the longer one."""
        return (self.whole - self.more) / (self.more - self.few)


def shorter_lengths(strategy: Sequence[Directive]) -> StepLengths | None:
    """Return the lengths to simulate a strategy with. None: with all its microbatches.

    That holds where it has few of them, where regions have microbatches of their own, and where more are
    under way in the whole step than in a shorter one, so that the shorter one would need less memory.
    """
    split = split_of(strategy)
    if split is None:
        return None
    placed = [directive for directive in strategy if isinstance(directive, Place | Replicate)]
    ranks = len({directive.devices for directive in placed})
    several = len({directive.at for directive in placed}) > ranks  # stages for each rank
    few = max(FEWEST, 2 * ranks if several else ranks)
    more = few + (ranks if several else max(2, few // STEADY))
    if few + more >= split.parts:
        return None
    short = shortened(strategy, more)
    if under_way(strategy) != under_way(short):
        return None
    return StepLengths(few=few, more=more, whole=split.parts)


def shortened(strategy: Sequence[Directive], parts: int) -> list[Directive]:
    """Return a strategy for the first microbatches alone: all others are left out of its orders."""
    split = split_of(strategy)
    assert split is not None, "its batch is cut once"
    made: list[Directive] = []
    for directive in strategy:
        if isinstance(directive, Split):
            made.append(replace(directive, parts=parts))
        elif isinstance(directive, Order):
            kept = (
                tuple(filter(None, (first(one, split.axis, parts) for one in g))) for g in directive.groups
            )
            groups = tuple(filter(None, kept))
            if groups:
                made.append(replace(directive, groups=groups))
        else:
            made.append(directive)
    return made


def first(at: At, axis: str, parts: int) -> At | None:
    """Return what a filter selects of the first microbatches. None: it selects only later ones."""
    tags = dict(at.tags)
    index = tags.get(axis)
    if isinstance(index, int):
        return at if index < parts else None
    if not isinstance(index, tuple):
        return at
    kept = tuple(number for number in index if number < parts)
    if not kept:
        return None
    tags[axis] = kept if len(kept) > 1 else kept[0]
    return At(tuple(tags.items()), at.phase)


def under_way(strategy: Sequence[Directive]) -> list[int]:
    """Return for each order how many forwards run at most before their backwards."""
    found = []
    for directive in strategy:
        if isinstance(directive, Order):
            running = most = 0
            for group in directive.groups:
                running += sum({"F": 1, "B": -1, "BI": -1}.get(at.phase or "", 0) for at in group)
                most = max(most, running)
            found.append(most)
    return found
