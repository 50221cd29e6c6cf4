"""Rules for operations that draw random numbers: a device draws for the whole value and uses its own part.

So a sharded model draws what one device draws. A value that no other device needs is drawn on each of them,
which costs less than to exchange it. Generators fill memory in order, so the whole value lies in memory as
that of the unsharded program does.
"""

import torch
from torch import fx
from torch.fx.node import Argument

from piper.capture.shard.compute_rules import pointwise
from piper.capture.shard.reshapes import tensor_of
from piper.capture.shard.shape_rules import operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import draws
from piper.ir.sharding import Shard


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


RULES: dict[object, Rule] = {
    aten.dropout.default: dropout,
    aten.feature_dropout.default: dropout,
    aten.rand_like.default: alike,
    aten.randn_like.default: alike,
}
