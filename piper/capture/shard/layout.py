"""How the devices of a group hold one value between them, and the collectives from one layout to another."""

from dataclasses import dataclass, field, replace

from piper.ir.chunk import Collective, CollectiveOp
from piper.ir.sharding import REPLICATE, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class CopiedShard(Shard):
    """A shard that each run of `copies` neighbours holds in common: heads of keys, where there are too few.

    The neighbours use it for different work, so each has a term of its gradient.
    """

    copies: int = 1


@dataclass(frozen=True, slots=True)
class OwnOrder(Shard):
    """Rows that each device has put into an order of its own, as a router sorts rows by expert.

    A device has as many rows as in `Shard`, and all of them are its own. Work on single rows is the same in
    any order, so only what looks at places of rows must know it.
    """

    order: str = ""  # the sort that made it; empty: as in `Shard`

    @property
    def places(self) -> Shard:
        """Return how other values lie that have the same places."""
        if not self.order:
            return Shard(self.dim, self.blocks, self.zigzag)
        return OwnOrder(self.dim, order=self.order)


@dataclass(frozen=True, slots=True)
class RowNumbers(OwnOrder):
    """Numbers of rows, each of a device's own rows once, counted from the first of them.

    On one device they count all rows. What looks rows up by them finds the same rows.
    """

    rows: Shard = field(default_factory=lambda: Shard(0))  # how the rows lie that they count
    per: int = 1  # so many neighbouring rows have one number: the pairs of a token


def slices_of(layout: Shard, degree: int) -> int:
    """Return how many different slices the devices of a group hold."""
    return degree // layout.copies if isinstance(layout, CopiedShard) else degree


def in_words(layout: Placement) -> str:
    """Return a layout as messages write it."""
    match layout:
        case Replicate():
            return "whole"
        case CopiedShard(dim=dim, copies=copies):
            return f"sharded along {dim}, each slice on {copies} devices"
        case OwnOrder(dim=dim, order=order) if order:
            return f"sharded along {dim}, on each device in its own order"
        case Shard(dim=dim):
            return f"sharded along {dim}"
        case Partial(op=op):
            return f"a {op} to be taken"


def divides(size: int, layout: Shard, degree: int) -> bool:
    """Return whether a dimension of `size` divides evenly."""
    slices = slices_of(layout, degree)
    return size % (layout.blocks * slices * (2 if layout.zigzag else 1)) == 0 and size > 0


def local_shape(shape: tuple[int, ...], layout: Placement, degree: int) -> tuple[int, ...]:
    """Return the shape of what one device holds."""
    if not isinstance(layout, Shard):
        return shape
    slices = slices_of(layout, degree)
    return tuple(size // slices if i == layout.dim else size for i, size in enumerate(shape))


def reshaped(old: tuple[int, ...], new: tuple[int, ...], layout: Shard, degree: int) -> Shard | None:
    """Return the layout of a reshaped value, or None where a device's part is not one slice of the result.

    Dimensions are matched in groups of equal size: [4, 6] -> [2, 2, 6] has the groups 4 -> 2, 2 and 6 -> 6.
    """
    for olds, news in _groups(old, new):
        if layout.dim not in olds:
            continue
        if any(old[dim] == 0 for dim in olds):
            return None
        if isinstance(layout, CopiedShard) and slices_of(layout, degree) == 1 and news:
            return layout.at(news[0])  # every device holds all of it: the first dimension is that of heads
        outer = layout.blocks
        for dim in olds:
            if dim < layout.dim:
                outer *= old[dim]
        prefix = 1
        for dim in news:
            size = new[dim]
            if outer % prefix == 0 and outer < prefix * size:
                result = replace(layout, dim=dim, blocks=outer // prefix)
                return result if divides(size, result, degree) else None
            prefix *= size
        return None
    return None


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Match the dimensions of two shapes in the smallest groups that have equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds: list[int] = []
        news: list[int] = []
        a = b = 1
        if i < len(old):
            olds.append(i)
            a, i = old[i], i + 1
        if j < len(new):
            news.append(j)
            b, j = new[j], j + 1
        while a != b:
            if a == 0 or b == 0:  # no elements: what is left matches in any order
                olds, news = [*olds, *range(i, len(old))], [*news, *range(j, len(new))]
                i, j = len(old), len(new)
                break
            if a < b:
                olds.append(i)
                a, i = a * old[i], i + 1
            else:
                news.append(j)
                b, j = b * new[j], j + 1
        groups.append((olds, news))
    return _joined(groups, old, new)


def _joined(
    groups: list[tuple[list[int], list[int]]], old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Join a group of ones on one side only, which holds nothing, to the group after it."""
    joined: list[tuple[list[int], list[int]]] = []
    waiting: tuple[list[int], list[int]] = ([], [])
    for olds, news in groups:
        olds, news = [*waiting[0], *olds], [*waiting[1], *news]
        waiting = ([], [])
        ones = all(old[i] == 1 for i in olds) and all(new[j] == 1 for j in news)
        if ones and (not olds or not news):
            waiting = (olds, news)
        else:
            joined.append((olds, news))
    if any(waiting):
        last = joined.pop() if joined else ([], [])
        joined.append(([*last[0], *waiting[0]], [*last[1], *waiting[1]]))
    return joined


def change(axis: str, degree: int, have: Placement, want: Placement, varies: bool) -> Collective:
    """Return the collective that brings a value from one layout to another.

    varies: the reader's work is sharded, so the gradient of a whole value comes back as a sum over the group.
    """

    def collective(
        op: CollectiveOp, back: CollectiveOp, joined: Placement = REPLICATE, cut: Placement = REPLICATE
    ) -> Collective:
        return Collective(
            axis=axis,
            degree=degree,
            op=op,
            back=back,
            joined=joined if isinstance(joined, Shard) else None,
            cut=cut if isinstance(cut, Shard) else None,
        )

    match have, want:
        case Shard(), Replicate():
            return collective("all_gather", "reduce_scatter" if varies else "slice", joined=have)
        case Shard(), Shard():
            return collective("all_to_all", "all_to_all", joined=have, cut=want)
        case Partial(op="max"), Replicate():
            return collective("max", "none")
        case Partial(), Replicate():
            return collective("all_reduce", "none")
        case Partial(op="sum"), Shard():
            return collective("reduce_scatter", "all_gather", cut=want)
        case Replicate(), Shard():
            return collective("slice", "all_gather", cut=want)
        case Replicate(), Replicate():
            return collective("none", "all_reduce")
    raise AssertionError(f"no collective leads from {have} to {want}")
