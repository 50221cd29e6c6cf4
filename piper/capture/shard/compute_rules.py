"""Rules for operations that compute, pointwise work, products and reductions, or that look up or draw.

A device draws random numbers for the whole value and uses its own part, so a sharded model draws what one
device draws. A value that no other device needs is drawn on each of them, which costs less than to exchange
it. Generators fill memory in order, so the whole value lies in memory as that of the unsharded program does.
"""

import math
import operator

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.dtensor_rules import VERIFIED, shard_as_dtensor
from piper.capture.shard.layout import tensor_of, value_of
from piper.capture.shard.shape_rules import along, getitem, named, number, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument, draws
from piper.ir.sharding import REPLICATE, Partial, Placement, Shard

ADDS = frozenset((aten.add.Tensor, aten.sub.Tensor))
SCALES = frozenset((aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar))
CASTS = frozenset((aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.to.other))
LINEAR = CASTS | {aten.neg.default}
LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default}
CHOOSES = {aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Tensor, aten.dropout.default}
POINTWISE = CASTS | LIKE | CHOOSES | {aten.__and__.Tensor, aten.__or__.Tensor}


def by_family(node: fx.Node) -> Rule | None:
    """Return the rule of an operation that has none of its own: that of pointwise work, or DTensor's."""
    target = node.target
    if target is operator.getitem:
        return getitem
    if not isinstance(target, torch._ops.OpOverload):
        return None
    each = torch.Tag.pointwise in target.tags or target in POINTWISE
    if each and isinstance(value_of(node), Tensor):
        return pointwise
    return shard_as_dtensor if str(target) in VERIFIED else None


def aligned(d: Sharder, source: fx.Node, layout: Shard, rank: int) -> Placement:
    """Return the layout of an operand of broadcast work whose result of `rank` dimensions has `layout`."""
    shape = d.shape(source)
    dim = layout.dim - (rank - len(shape))
    if dim >= 0 and d.layout(source) == layout.at(dim):  # also one head that every device holds
        return layout.at(dim)
    return REPLICATE if dim < 0 or shape[dim] == 1 else layout.at(dim)


def spread(d: Sharder, sources: list[fx.Node], rank: int) -> Shard | None:
    """Return the sharding of broadcast work over operands: that of the largest sharded one."""
    sharded = [(source, have) for source in sources if isinstance(have := d.layout(source), Shard)]
    if not sharded:
        return None
    source, have = max(sharded, key=lambda pair: math.prod(d.shape(pair[0])))
    return have.at(have.dim + rank - len(d.shape(source)))


def together(d: Sharder, sources: list[fx.Node], rank: int) -> tuple[Shard | None, dict[fx.Node, fx.Node]]:
    """Return the sharding of broadcast work of some rank, and its operands in it; none if all are whole."""
    layout = spread(d, sources, rank)
    for source in sources:
        if isinstance(d.layout(source), Partial):
            like = aligned(d, source, layout, rank) if layout is not None else None
            d.settle(source, like if isinstance(like, Shard) else None)
    layout = spread(d, sources, rank)
    if layout is None:
        return None, {}
    return layout, {s: d.to(s, aligned(d, s, layout, rank), varies=True) for s in sources}


def pointwise(d: Sharder, node: fx.Node) -> None:
    """Shard work on single elements as its operands are; a sum passes through what is linear."""
    sources = node.all_input_nodes
    if all(d.layout(source) == Partial() for source in sources) and _is_linear(node):
        d.done(node, d.replay(node), Partial())
        return
    layout, local = together(d, sources, len(d.shape(node)))
    if layout is None:
        d.plain(node)
        return
    d.done(node, d.replay(node, local), layout)


def _is_linear(node: fx.Node) -> bool:
    """Return whether an operation on sums is the sum of the operation on their terms.

    A number may scale a sum; added, every device would add it. A sum may not scale a sum, nor itself.
    """
    numbers = not isinstance(node.args[1], fx.Node) if len(node.args) > 1 else True
    if node.target in SCALES:
        return numbers
    if node.target in ADDS:
        return not numbers
    return node.target in LINEAR and _keeps_fractions(node)


def _keeps_fractions(node: fx.Node) -> bool:
    """Return whether no cast rounds terms of a sum, each by itself, to integers or truth values."""
    result, given = tensor_of(node), tensor_of(operand(node))
    return result.is_floating_point() or (not given.is_floating_point() and result.dtype is not torch.bool)


def linear(d: Sharder, node: fx.Node) -> None:
    """Multiply by a weight of [out, in]: sharded outputs need whole inputs, sharded inputs give a sum."""
    bias = argument(node, "bias")
    _product(d, node, operand(node), operand(node, 1), bias if isinstance(bias, fx.Node) else None, out_dim=0)


def addmm(d: Sharder, node: fx.Node) -> None:
    """Multiply by a weight of [in, out] and add a bias."""
    bias, x, weight = (operand(node, position) for position in range(3))
    if node.kwargs or len(d.shape(bias)) != 1:
        raise NoRuleError("only a bias of one dimension is added, unscaled")
    _product(d, node, x, weight, bias, out_dim=1)


def _product(
    d: Sharder, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, out_dim: int
) -> None:
    given, have = d.settle(x), d.settle(weight)
    last = len(d.shape(x)) - 1
    out: Placement = Partial()
    varies = True
    if not isinstance(have, Shard):
        out = given if isinstance(given, Shard) and given.dim != last else REPLICATE
        varies = isinstance(out, Shard) or d.varies([x, weight])
        wants: tuple[Placement, ...] = (out, REPLICATE, REPLICATE)
    elif have.dim == out_dim:
        out, wants = have.at(last), (REPLICATE, have, have.at(0))
    else:
        wants = (have.at(last), have, REPLICATE)
    args = [d.to(each, want, varies=varies) for each, want in zip((x, weight), wants, strict=False)]
    if bias is not None and out == Partial():  # one device of the group adds it, so that the sum has it once
        first = d.emit(aten.eq.Scalar, (d.place(), 0))
        args.append(d.emit(aten.mul.Tensor, (d.to(bias, wants[2], varies=varies), first)))
    elif bias is not None:
        args.append(d.to(bias, wants[2], varies=varies))
    d.done(node, d.emit(node.target, tuple(args if out_dim == 0 else (args[2], *args[:2]))), out)


def matmul(d: Sharder, node: fx.Node) -> None:
    """Multiply two values: sharded along a batch dimension, a free dimension of one, or the summed one."""
    a, b = operand(node), operand(node, 1)
    if d.whole(node):
        return
    sa, sb = d.shape(a), d.shape(b)
    la, lb, rank = d.layout(a), d.layout(b), len(d.shape(node))
    ka, kb = len(sa) - 1, max(0, len(sb) - 2)  # the dimensions that are summed
    wa: Placement = REPLICATE
    wb: Placement = REPLICATE
    out: Placement = REPLICATE
    summed = ((la, ka), (lb, kb))
    have = next((each for each, dim in summed if isinstance(each, Shard) and each.dim == dim), None)
    vector = min(len(sa), len(sb)) == 1
    if vector and isinstance(la, Shard) and la.dim != ka:
        wa = out = la
    elif vector and have is None and isinstance(lb, Shard):
        wb, out = lb, lb.at(lb.dim - (lb.dim > kb))
    elif have is not None:
        wa, wb, out = have.at(ka), have.at(kb), Partial()
    elif isinstance(la, Shard) and la.dim == len(sa) - 2:
        wa, out = la, la.at(rank - 2)
    elif (free := isinstance(lb, Shard) and lb.dim == len(sb) - 1) and not isinstance(la, Shard):
        wb, out = lb, lb.at(rank - 1)
    else:
        out = spread(d, [a] if free else [a, b], rank) or REPLICATE
        assert isinstance(out, Shard)
        wa, wb = aligned(d, a, out, rank), aligned(d, b, out, rank)
    # Not replayed: a value that is multiplied by itself has two layouts.
    d.done(node, d.emit(node.target, (d.to(a, wa, varies=True), d.to(b, wb, varies=True))), out)


def reduction(d: Sharder, node: fx.Node) -> None:
    """Reduce other dimensions locally; over the sharded one every device has a term."""
    x = operand(node)
    if d.layout(x) == Partial() and node.target not in MAXIMA and _keeps_fractions(node):
        d.done(node, d.replay(node), Partial())
        return
    have = d.settle(x)
    if not isinstance(have, Shard):
        d.plain(node)
        return
    dims = sorted(named(node, len(d.shape(x))))
    if have.dim not in dims:
        along(named)(d, node)
        return
    result = d.replay(node)
    if node.target in MEANS:
        d.done(node, d.emit(aten.div.Scalar, (result, d.degree)), Partial())
    elif node.target in MAXIMA:
        _maximum(d, node, x, result, dims)
    else:
        d.done(node, result, Partial())


def _maximum(d: Sharder, node: fx.Node, x: fx.Node, own: fx.Node, dims: list[int]) -> None:
    """Take a maximum over the sharded dimension; all elements that are equal to it share its gradient."""
    fixed = d.emit(aten.detach.default, (own,))
    if not d.trains(own):
        d.done(node, fixed, Partial("max"))
        return
    shape = [1 if dim in dims else size for dim, size in enumerate(d.shape(x))]
    largest = d.emit(aten.reshape.default, (d.collect(fixed, Partial("max")), shape))
    equal = d.emit(aten.eq.Tensor, (d.local[x], largest))
    counts = d.emit(aten.to.dtype, (equal, own.meta["example_value"].dtype))
    count = d.collect(d.emit(aten.sum.dim_IntList, (counts, dims, True)), Partial())
    shares = d.emit(aten.div.Tensor, (d.emit(aten.where.ScalarOther, (equal, d.local[x], 0.0)), count))
    keep = len(d.shape(node)) == len(d.shape(x))
    d.done(node, d.emit(aten.sum.dim_IntList, (shares, dims, keep)), Partial())


def dropout(d: Sharder, node: fx.Node) -> None:
    """Drop what one device would drop."""
    x = operand(node)
    have = d.settle(x)
    if not draws(node) or not (isinstance(have, Shard) or d.relaid(x)):
        pointwise(d, node)
        return
    drawn = d.emit(node.target, (_whole(d, x, aten.ones.default), *node.args[1:]))
    own = d.take(drawn, have) if isinstance(have, Shard) else drawn
    d.done(node, d.emit(aten.mul.Tensor, (d.local[x], own)), have)


def alike(d: Sharder, node: fx.Node) -> None:
    """Draw a value of the shape of another: for the whole shape, of which a device takes its part."""
    x = operand(node)
    have = d.settle(x)
    whole = _whole(d, x, aten.empty.memory_format)
    drawn = d.emit(node.target, (whole, *node.args[1:]), node.kwargs)
    d.done(node, d.take(drawn, have) if isinstance(have, Shard) else drawn, have)


def _whole(d: Sharder, x: fx.Node, make: object) -> fx.Node:
    """Write a new value of the shape that a value has unsharded, laid out in memory as PyTorch would."""
    local, value = d.local[x].meta["example_value"], tensor_of(x)
    with d.fakes:
        strides = torch.empty_like(value).stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    options: dict[str, Argument] = {"dtype": local.dtype, "device": local.device}
    whole = d.emit(make, ([d.shape(x)[dim] for dim in order],), options)
    back = [order.index(dim) for dim in range(value.dim())]
    return whole if back == sorted(back) else d.emit(aten.permute.default, (whole, back))


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


MEANS = frozenset((aten.mean.default, aten.mean.dim))
MAXIMA = frozenset((aten.amax.default,))

DRAWS: dict[object, Rule] = {
    **dict.fromkeys((aten.dropout.default, aten.feature_dropout.default), dropout),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), alike),
}
RULES: dict[object, Rule] = {
    **DRAWS,
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), matmul),
    **dict.fromkeys((aten.mv.default, aten.dot.default), matmul),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, *MEANS, *MAXIMA), reduction),
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten._unsafe_index.Tensor: indexed,  # in which torch writes interpolations
}
