"""How the devices of a group hold one value between them, and the collectives and reshapes that change it."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from piper.capture.trace.graph_walks import reached
from piper.ir.chunk import Collective, CollectiveOp
from piper.ir.sharding import Partial, Placement, Replicate, Shard

aten = torch.ops.aten
RESHAPES = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.alias.default,
    )
)
REPLAYED = RESHAPES | {aten.expand.default, aten.transpose.int}


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


def reshaped(old: Sequence[int], new: Sequence[int], layout: Shard, degree: int) -> Shard | None:
    """Return the layout of a reshaped value, or None where a device's part is not one slice of the result.

    A reshape keeps the order of elements. So the dimension that is sharded then is the one at which as many
    equal runs end, of which each device has a slice, as before.
    """
    old, new = ([size or 1 for size in shape] for shape in (old, new))  # a value without elements has any
    if isinstance(layout, CopiedShard) and slices_of(layout, degree) == 1:
        return _all_held(old, new, layout)
    runs = layout.blocks * math.prod(old[: layout.dim])
    for dim, size in enumerate(new):
        before = math.prod(new[:dim])
        if runs % before == 0 and runs < before * size:
            result = replace(layout, dim=dim, blocks=runs // before)
            return result if divides(size, result, degree) else None
    return None


def _all_held(old: Sequence[int], new: Sequence[int], layout: CopiedShard) -> Shard | None:
    """Return the layout of a reshaped value that every device holds whole: the dimension is that of heads.

    It may have the size 1, so the first that begins at the same element as before is taken.
    """
    same = next((i for i, sizes in enumerate(zip(old, new, strict=False)) if len({*sizes}) > 1), len(old))
    for start in range(layout.dim, -1, -1):
        for dim in range(min(same, start), len(new)):
            if math.prod(new[:dim]) == math.prod(old[:start]):
                return layout.at(dim)
    return None


def change(axis: str, degree: int, have: Placement, want: Placement, varies: bool) -> Collective:
    """Return the collective that brings a value from one layout to another.

    varies: the reader's work is sharded, so the gradient of a whole value comes back as a sum over the group.
    """

    ops: tuple[CollectiveOp, CollectiveOp]  # forward and backward
    match have, want:
        case Shard(), Replicate():
            ops = "all_gather", "reduce_scatter" if varies else "slice"
        case Shard(), Shard():
            ops = "all_to_all", "all_to_all"
        case Partial(op="max"), Replicate():
            ops = "max", "none"
        case Partial(), Replicate():
            ops = "all_reduce", "none"
        case Partial(op="sum"), Shard():
            ops = "reduce_scatter", "all_gather"
        case Replicate(), Shard():
            ops = "slice", "all_gather"
        case Replicate(), Replicate():
            ops = "none", "all_reduce"
        case _:
            raise AssertionError(f"no collective leads from {have} to {want}")
    return Collective(
        axis=axis,
        degree=degree,
        op=ops[0],
        back=ops[1],
        joined=have if isinstance(have, Shard) else None,
        cut=want if isinstance(want, Shard) else None,
    )


def value_of(node: fx.Node) -> object:
    """Return what a node of an unsharded forward computes, as fakes."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def tensor_of(node: fx.Node) -> Tensor:
    """Return the tensor that a node of an unsharded forward computes, as a fake."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return value


def read_later(source: fx.Node, write: fx.Node) -> dict[fx.Node, list[fx.Node]]:
    """Return the names from before a write of the memory that it writes, and who reads each of them later."""
    order = {node: i for i, node in enumerate(source.graph.nodes)}
    base = source
    while _is_view(base):
        base = base.all_input_nodes[0]

    def views(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if _is_view(user) and user.all_input_nodes[0] is node]

    earlier = [name for name in reached([base], views) if order[name] < order[write]]
    return {name: [user for user in name.users if order[user] > order[write]] for name in earlier}


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return any(result.alias_info is not None for result in node.target._schema.returns)
