"""Rules for operations that draw random numbers: a device draws for the whole value and uses its own part.

So a sharded model draws what one device draws. A value that no other device needs is drawn on each of them,
which costs less than to exchange it. Generators fill memory in order, so the whole value lies in memory as
that of the undivided program does.
"""

import math

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from piper.capture.shard.attention_shapes import WEIGHTS
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import aligned, pointwise
from piper.capture.shard.loss_rules import softmax
from piper.capture.shard.reshapes import value_of
from piper.capture.shard.ring import scale_of
from piper.capture.shard.shape_rules import argument, number, operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import draws
from piper.ir.sharding import Shard

ATTENTION_RANK = 4  # [batch, heads, queries, keys]


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
    """Write a new value of the shape that a value has undivided, laid out in memory as PyTorch would."""
    local, value = d.local[x].meta["example_value"], value_of(x)
    assert isinstance(value, Tensor)
    with d.fakes:
        strides = torch.empty_like(value).stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    options: dict[str, Argument] = {"dtype": local.dtype, "device": local.device}
    made = d.emit(make, ([d.shape(x)[dim] for dim in order],), options)
    back = [order.index(dim) for dim in range(value.dim())]
    return made if back == sorted(back) else d.emit(aten.permute.default, (made, back))


def attend_and_drop(
    d: Sharder, node: fx.Node, local: list[fx.Node], have: Shard, mask: fx.Node | None
) -> fx.Node:
    """Attend from a device's own heads or queries, and drop the weights that one device would drop.

    The weights are computed one by one, because a fused kernel draws for what it is given.
    """
    query, key, value = local
    groups = _size(query, 1) // _size(key, 1)
    if groups > 1:
        key, value = (d.emit(aten.repeat_interleave.self_int, (x, groups, 1)) for x in (key, value))
    products = d.emit(aten.matmul.default, (query, d.emit(aten.transpose.int, (key, -2, -1))))
    scores = d.emit(aten.mul.Scalar, (products, scale_of(d, node)))
    if mask is None and argument(node, 5, "is_causal", False):
        mask = causal_mask(d, _size(scores, -2), _size(scores, -1))
    if mask is not None and mask.meta["example_value"].is_floating_point():
        scores = d.emit(aten.add.Tensor, (scores, mask))
    elif mask is not None:
        scores = d.emit(aten.where.ScalarOther, (mask, scores, -math.inf))
    weights = d.emit(aten._safe_softmax.default, (scores, -1))  # a query that sees no key has zeros
    example = weights.meta["example_value"]
    shape = [int(size) for size in example.shape]
    shape[have.dim] *= d.degree
    options: dict[str, Argument] = {"dtype": example.dtype, "device": example.device}
    ones = d.emit(aten.ones.default, (list(node.meta.get(WEIGHTS, shape)),), options)
    drawn = d.emit(aten.dropout.default, (ones, argument(node, 4, "dropout_p", 0.0), True))
    own = d.take(d.emit(aten.reshape.default, (drawn, shape)), have)
    return d.emit(aten.matmul.default, (d.emit(aten.mul.Tensor, (weights, own)), value))


def safe_softmax(d: Sharder, node: fx.Node) -> None:
    """Normalise exponentials over a dimension that is whole."""
    have = d.settle(operand(node))
    if isinstance(have, Shard) and have.dim == number(node.args[1]) % len(d.shape(node)):
        raise NoRuleError("it normalises over the sharded dimension")
    softmax(d, node)


def mask_of(d: Sharder, node: fx.Node, have: Shard) -> fx.Node | None:
    """Return a device's part of the mask that attention is given, if it is given one."""
    given = argument(node, 3, "attn_mask")
    if not isinstance(given, fx.Node):
        return None
    return d.to(given, aligned(d, given, have, ATTENTION_RANK), varies=True)


def causal_mask(d: Sharder, queries: int, keys: int) -> fx.Node:
    """Return which keys each query attends to: those up to its own place."""
    assert d.node is not None
    value = value_of(d.node)
    assert isinstance(value, Tensor)
    options: dict[str, Argument] = {"dtype": None, "device": value.device}
    rows, columns = (d.emit(aten.arange.default, (count,), options) for count in (queries, keys))
    return d.emit(aten.ge.Tensor, (d.emit(aten.unsqueeze.default, (rows, 1)), columns))


def _size(node: fx.Node, dim: int) -> int:
    return int(node.meta["example_value"].shape[dim])


RULES: dict[object, Rule] = {
    aten._safe_softmax.default: safe_softmax,
    aten.dropout.default: dropout,
    aten.feature_dropout.default: dropout,
    aten.rand_like.default: alike,
    aten.randn_like.default: alike,
}
