"""Which rows and which slices of a weight one device multiplies, from the documented rules alone.

A product in fp8 takes its scales from what a device has (docs/directives/precision.md). The reference of
`piper check` rounds by the same slices, and finds them here. It shares no code with what shards a model.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from piper.directives import Directive, ShardAxis
from piper.ir.chunk import Parameter
from piper.ir.sharding import Shard

Indices = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShards:
    """How the products of a weight are cut over devices."""

    slices: tuple[tuple[int, int, int], ...] = ()  # of the weight: dimension, blocks and degree along an axis
    rows: tuple[tuple[int, bool, int], ...] = ()  # of the rows: dimension, zigzag and degree; innermost first

    def of_dimension(self, dim: int, size: int) -> list[Indices]:
        """Return which indices of a dimension of the weight lie in each of its slices."""
        pieces = [list(range(size))]
        for along, blocks, degree in self.slices:
            if along == dim:
                pieces = [cut for piece in pieces for cut in dealt(piece, blocks, degree)]
        return pieces

    def of_sequence(self, dim: int, length: int) -> list[Indices]:
        """Return which places of the sequence, the dimension `dim` of rows, each device has."""
        pieces = [list(range(length))]
        for along, zigzag, degree in reversed(self.rows):  # an inner axis cuts what an outer one leaves
            if along != dim:
                continue
            if zigzag:
                halves = [dealt(piece, 1, 2 * degree) for piece in pieces]
                pieces = [each[i] + each[-1 - i] for each in halves for i in range(degree)]
            else:
                pieces = [cut for piece in pieces for cut in dealt(piece, 1, degree)]
        return pieces


def dealt(indices: Indices, blocks: int, degree: int) -> list[Indices]:
    """Cut each of some equal blocks of a dimension into as many slices, and return those of each device."""
    each = len(indices) // (blocks * degree)
    starts = [[(block * degree + rank) * each for block in range(blocks)] for rank in range(degree)]
    return [[index for start in some for index in indices[start : start + each]] for some in starts]


def shards_of(param: Parameter, strategy: Iterable[Directive]) -> ProductShards:
    """Return how products of a parameter are cut by a strategy.

    A weight that is whole, and whose gradient is a sum along an axis, meets the rows of each device alone.
    """
    held = {each.axis: each for each in param.placements}
    slices, rows = [], []
    for axis in {each.axis: each for each in strategy if isinstance(each, ShardAxis)}.values():
        own = held.get(axis.axis)
        if own is None:
            continue
        cuts_rows = own.partial and (axis.batch or axis.between is not None)
        if isinstance(own.placement, Shard):
            slices.append((own.placement.dim, own.placement.blocks, own.degree))
        elif cuts_rows:
            dim = axis.batch[0][1] if axis.batch else axis.between
            rows.append((dim or 0, axis.balance == "zigzag", own.degree))
    return ProductShards(slices=tuple(slices), rows=tuple(rows))
