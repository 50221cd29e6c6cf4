"""Rules for looking up: rows of a table by their index, elements by tensors of indices."""

import torch
from torch import fx

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import aligned, spread
from piper.capture.shard.shape_rules import number, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument
from piper.ir.sharding import REPLICATE, Partial, Shard


def embedding(d: Sharder, node: fx.Node) -> None:
    """Look up rows of a table: a whole one, or one sharded by columns or by rows."""
    table, index = operand(node), operand(node, 1)
    if d.whole(node):
        return
    have, given = d.layout(table), d.layout(index)
    rest = (argument(node, "padding_idx"), argument(node, "scale_grad_by_freq"))
    if rest[1] and (given != REPLICATE or have not in (REPLICATE, Shard(1))):
        raise NoRuleError("how often an index occurs, by which it scales gradients, is not counted")
    if have == REPLICATE:
        local = (d.to(table, REPLICATE, varies=True), d.local[index], *rest)
        d.done(node, d.emit(node.target, local), given)
    elif isinstance(have, Shard) and have.dim == 1:
        local = (d.local[table], d.to(index, REPLICATE, varies=True), *rest)
        d.done(node, d.emit(node.target, local), have.at(len(d.shape(node)) - 1))
    else:
        assert isinstance(have, Shard)
        whole = d.to(index, REPLICATE, varies=True)
        rows, outside = own_rows(d, whole, have, d.shape(table)[0])
        read = d.emit(aten.embedding.default, (d.local[table], rows))
        padding = number(rest[0])
        if padding >= 0:  # the padding row has no gradient
            fixed = d.emit(aten.detach.default, (read,))
            pad = d.emit(aten.unsqueeze.default, (d.emit(aten.eq.Scalar, (whole, padding)), -1))
            read = d.emit(aten.where.self, (pad, fixed, read))
        d.done(node, masked(d, read, outside), Partial())


def own_rows(d: Sharder, index: fx.Node, have: Shard, size: int) -> tuple[fx.Node, fx.Node]:
    """Return indices within a device's own rows of a sharded table, and which of them lie outside."""
    rows, shifted = size // d.degree, from_own_first(d, index, have, size)
    low, high = d.emit(aten.lt.Scalar, (shifted, 0)), d.emit(aten.ge.Scalar, (shifted, rows))
    return d.emit(aten.clamp.default, (shifted, 0, rows - 1)), d.emit(aten.logical_or.default, (low, high))


def from_own_first(d: Sharder, index: fx.Node, have: Shard, size: int) -> fx.Node:
    """Return indices counted from the first of a device's own rows."""
    if have.blocks > 1 or have.zigzag:
        raise NoRuleError("the rows of a table are sharded in one run")
    first = d.emit(aten.mul.Tensor, (d.place(), size // d.degree))
    if not index.meta["example_value"].dim():
        first = d.emit(aten.reshape.default, (first, []))
    return d.emit(aten.sub.Tensor, (index, first))


def masked(d: Sharder, values: fx.Node, outside: fx.Node) -> fx.Node:
    """Return values with zeros in place of those from outside a device's own rows."""
    more = values.meta["example_value"].dim() - outside.meta["example_value"].dim()
    for _ in range(more):
        outside = d.emit(aten.unsqueeze.default, (outside, -1))
    return d.emit(aten.masked_fill.Scalar, (values, outside, 0.0))


def gather(d: Sharder, node: fx.Node) -> None:
    """Pick elements along a dimension: each device in its own rows, or in its part of that dimension."""
    x, index = operand(node), operand(node, 2)
    dim = number(node.args[1]) % max(1, len(d.shape(x)))
    if d.whole(node):
        return
    have = d.layout(x)
    if isinstance(have, Shard) and have.dim == dim:
        rows, outside = own_rows(d, d.to(index, REPLICATE, varies=True), have, d.shape(x)[dim])
        d.done(node, masked(d, d.emit(node.target, (d.local[x], dim, rows)), outside), Partial())
        return
    layout = have if isinstance(have, Shard) else d.layout(index)
    if (
        not isinstance(layout, Shard)
        or layout.dim == dim
        or d.shape(x)[layout.dim] != d.shape(index)[layout.dim]
    ):
        raise NoRuleError("its index is sharded in another way than its values")
    picked = d.emit(node.target, (d.to(x, layout, varies=True), dim, d.to(index, layout, varies=True)))
    d.done(node, picked, layout)


def indexed(d: Sharder, node: fx.Node) -> None:
    """Take elements by tensors: not along the sharded dimension, or by sharded indices into a whole value."""
    x, given = operand(node), node.args[1]
    assert isinstance(given, list | tuple)
    if d.whole(node):
        return
    at = [i for i, index in enumerate(given) if index is not None]
    indices = [index for index in given if isinstance(index, fx.Node)]
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices):
        raise NoRuleError("how many elements a mask keeps is not known")
    have, first = d.layout(x), at[0] if at[-1] - at[0] == len(at) - 1 else 0
    rank = max(len(d.shape(index)) for index in indices)
    index_layout = spread(d, indices, rank)
    if isinstance(have, Shard):
        if have.dim in at:
            raise NoRuleError("it picks elements of the sharded dimension")
        before = sum(dim < have.dim for dim in at)
        out = have.at(have.dim - before + (rank if have.dim > first or first != at[0] else 0))
        local = {index: d.to(index, REPLICATE, varies=True) for index in indices} | {x: d.local[x]}
    else:
        assert index_layout is not None
        out = index_layout.at(index_layout.dim + first)
        local = {i: d.to(i, aligned(d, i, index_layout, rank), varies=True) for i in indices}
        local[x] = d.to(x, REPLICATE, varies=True)
    d.done(node, d.replay(node, local), out)


RULES: dict[object, Rule] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten._unsafe_index.Tensor: indexed,  # in which torch writes interpolations
}
