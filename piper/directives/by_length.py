"""A strategy that depends on the length of the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

from piper.directives.base import Directive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLength(Sequence[Directive]):
    """A strategy for each length of batches. As a sequence it has the directives of the one that is chosen.

    A batch takes the strategy of the least limit that is not below its length: the largest size of axis 1
    among its fields. One that is longer than all limits takes the strategy of the largest.
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

    def for_batch(self, batch: Mapping[str, "Tensor"]) -> "ByLength":
        """Return the same strategies, with the one chosen that batches like `batch` take."""
        length = max((field.shape[1] for field in batch.values() if field.dim() > 1), default=1)
        limit = min((limit for limit in self.strategies if limit >= length), default=max(self.strategies))
        return self if limit == self.limit else replace(self, limit=limit)


def by_length(strategies: Mapping[int, Sequence[Directive]]) -> ByLength:
    """Return strategies by length, with the one for the shortest batches chosen."""
    return ByLength(strategies=dict(sorted(strategies.items())), limit=min(strategies))
