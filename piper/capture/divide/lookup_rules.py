"""Rules for looking up: rows of a table by their index, elements by tensors of indices."""

import torch
from torch import fx
from torch.fx.node import map_arg

from piper.capture.divide.compute_rules import aligned, spread
from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.division import NoRuleError
from piper.capture.divide.layout import WHOLE, Divided, Sum
from piper.capture.divide.shape_rules import argument, number, operand


def embedding(d: Divider, node: fx.Node) -> None:
    """Look up rows of a table: a whole one, or one divided by columns or by rows."""
    table, index = node.args[0], node.args[1]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    if d.whole(node):
        return
    held, given = d.layout(table), d.layout(index)
    rest = (argument(node, 2, "padding_idx", -1), argument(node, 3, "scale_grad_by_freq", False))
    if rest[1] and (given != WHOLE or held not in (WHOLE, Divided(1))):
        raise NoRuleError("how often an index occurs, by which it scales gradients, is not counted")
    if held == WHOLE:
        made = d.emit(node.target, (d.to(table, WHOLE, varies=True), d.local[index], *rest))
        d.done(node, made, given)
    elif isinstance(held, Divided) and held.dim == 1:
        made = d.emit(node.target, (d.local[table], d.to(index, WHOLE, varies=True), *rest))
        d.done(node, made, held.at(len(d.shape(node)) - 1))
    else:
        assert isinstance(held, Divided)
        whole = d.to(index, WHOLE, varies=True)
        rows, outside = own_rows(d, whole, held, d.shape(table)[0])
        found = d.emit(aten.embedding.default, (d.local[table], rows))
        padding = number(rest[0])
        if padding >= 0:  # the padding row has no gradient
            fixed = d.emit(aten.detach.default, (found,))
            pad = d.emit(aten.unsqueeze.default, (d.emit(aten.eq.Scalar, (whole, padding)), -1))
            found = d.emit(aten.where.self, (pad, fixed, found))
        d.done(node, masked(d, found, outside), Sum())


def own_rows(d: Divider, index: fx.Node, held: Divided, size: int) -> tuple[fx.Node, fx.Node]:
    """Return indices within a device's own rows of a divided table, and which of them lie outside."""
    if held.blocks > 1 or held.zigzag:
        raise NoRuleError("the rows of a table are divided in one run")
    rows = size // d.degree
    first = d.emit(aten.mul.Tensor, (d.place(), rows))
    if not index.meta["example_value"].dim():
        first = d.emit(aten.reshape.default, (first, []))
    shifted = d.emit(aten.sub.Tensor, (index, first))
    low, high = d.emit(aten.lt.Scalar, (shifted, 0)), d.emit(aten.ge.Scalar, (shifted, rows))
    return d.emit(aten.clamp.default, (shifted, 0, rows - 1)), d.emit(aten.logical_or.default, (low, high))


def masked(d: Divider, found: fx.Node, outside: fx.Node) -> fx.Node:
    """Return values with zeros in place of those from outside a device's own rows."""
    more = found.meta["example_value"].dim() - outside.meta["example_value"].dim()
    for _ in range(more):
        outside = d.emit(aten.unsqueeze.default, (outside, -1))
    return d.emit(aten.masked_fill.Scalar, (found, outside, 0.0))


def gather(d: Divider, node: fx.Node) -> None:
    """Pick elements along a dimension: each device in its own rows, or in its part of that dimension."""
    x, index = node.args[0], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(index, fx.Node)
    dim = number(node.args[1]) % max(1, len(d.shape(x)))
    if d.whole(node):
        return
    have = d.layout(x)
    if isinstance(have, Divided) and have.dim == dim:
        rows, outside = own_rows(d, d.to(index, WHOLE, varies=True), have, d.shape(x)[dim])
        d.done(node, masked(d, d.emit(node.target, (d.local[x], dim, rows)), outside), Sum())
        return
    layout = have if isinstance(have, Divided) else d.layout(index)
    if (
        not isinstance(layout, Divided)
        or layout.dim == dim
        or d.shape(x)[layout.dim] != d.shape(index)[layout.dim]
    ):
        raise NoRuleError("its index is divided in another way than its values")
    made = d.emit(node.target, (d.to(x, layout, varies=True), dim, d.to(index, layout, varies=True)))
    d.done(node, made, layout)


def indexed(d: Divider, node: fx.Node) -> None:
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
    local: dict[fx.Node, fx.Node] = {}
    if isinstance(have, Divided):
        if have.dim in at:
            raise NoRuleError("it picks elements of the sharded dimension")
        before = sum(dim < have.dim for dim in at)
        out = have.at(have.dim - before + (rank if have.dim > first or first != at[0] else 0))
        local = {index: d.to(index, WHOLE, varies=True) for index in indices} | {x: d.local[x]}
    else:
        assert index_layout is not None
        out = index_layout.at(index_layout.dim + first)
        local = {i: d.to(i, aligned(d, i, index_layout, rank), varies=True) for i in indices}
        local[x] = d.to(x, WHOLE, varies=True)
    d.done(node, d.emit(node.target, map_arg(node.args, local.__getitem__)), out)


RULES: dict[object, Rule] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
}
