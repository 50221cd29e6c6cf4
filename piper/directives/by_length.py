"""A strategy that depends on the length of the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from piper.directives.base import Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLength(Sequence[Directive]):
    """A strategy for each length of batches. As a sequence it has the directives of the one that is chosen.

    A batch takes the strategy of the least limit that is not below its length. One that is longer than all
    limits takes the strategy of the largest.
    """

    strategies: Mapping[int, Sequence[Directive]]  # by limit
    limit: int  # of the one that is chosen

    @overload
    def __getitem__(self, index: int) -> Directive: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Directive]: ...
    def __getitem__(self, index: int | slice) -> Directive | Sequence[Directive]:
        return self.strategies[self.limit][index]

    def __len__(self) -> int:
        return len(self.strategies[self.limit])

    def limit_for(self, length: int) -> int:
        """Return the limit whose strategy batches of a length take."""
        return min((limit for limit in self.strategies if limit >= length), default=max(self.strategies))


def by_length(strategies: Mapping[int, Sequence[Directive]]) -> ByLength:
    """Return strategies by length, with the one for the shortest batches chosen."""
    return ByLength(strategies=dict(sorted(strategies.items())), limit=min(strategies))
