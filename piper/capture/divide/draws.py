"""Rules for operations that draw random numbers: a device draws for the whole value and uses its own part.

So a divided model draws what one device draws. A value that no other device needs is drawn on each of them,
which costs less than to exchange it.
"""

import math

from torch import fx
from torch.fx.node import Argument

from piper.capture.divide.compute_rules import aligned
from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.layout import Divided
from piper.capture.divide.shape_rules import argument, operand

ATTENTION_RANK = 4  # [batch, heads, queries, keys]


def alike(d: Divider, node: fx.Node) -> None:
    """Draw a value of the shape of another: for the whole shape, of which a device takes its part."""
    x = operand(node)
    have = d.settle(x)
    if not isinstance(have, Divided):
        d.plain(node)
        return
    value = d.local[x].meta["example_value"]
    options: dict[str, Argument] = {"dtype": value.dtype, "device": value.device}
    whole = d.emit(aten.empty.memory_format, (list(d.shape(x)),), options)
    drawn = d.emit(node.target, (whole, *node.args[1:]), node.kwargs)
    d.done(node, d.take(drawn, have), have)


def attend_and_drop(
    d: Divider, node: fx.Node, local: list[fx.Node], have: Divided, mask: fx.Node | None
) -> fx.Node:
    """Attend on a device's own heads, and drop the weights that one device would drop.

    The weights are computed one by one, because a fused kernel draws for the heads that it is given.
    """
    query, key, value = local
    groups = _size(query, 1) // _size(key, 1)
    if groups > 1:
        key, value = (d.emit(aten.repeat_interleave.self_int, (x, groups, 1)) for x in (key, value))
    scale = argument(node, 6, "scale")
    if not isinstance(scale, float):
        scale = 1 / math.sqrt(_size(query, -1))
    products = d.emit(aten.matmul.default, (query, d.emit(aten.transpose.int, (key, -2, -1))))
    scores = d.emit(aten.mul.Scalar, (products, scale))
    if mask is not None and mask.meta["example_value"].is_floating_point():
        scores = d.emit(aten.add.Tensor, (scores, mask))
    elif mask is not None:
        scores = d.emit(aten.where.ScalarOther, (mask, scores, -math.inf))
    elif argument(node, 5, "is_causal", False):
        scores = d.emit(aten.where.ScalarOther, (_causal(d, scores), scores, -math.inf))
    weights = d.emit(aten.softmax.int, (scores, -1))
    example = weights.meta["example_value"]
    batch, heads, queries, keys = (int(size) for size in example.shape)
    shape = [batch, heads, queries, keys]
    shape[have.dim] *= d.degree
    options: dict[str, Argument] = {"dtype": example.dtype, "device": example.device}
    ones = d.emit(aten.ones.default, (shape,), options)
    drawn = d.emit(aten.dropout.default, (ones, argument(node, 4, "dropout_p", 0.0), True))
    kept = d.emit(aten.mul.Tensor, (weights, d.take(drawn, have)))
    return d.emit(aten.matmul.default, (kept, value))


def mask_of(d: Divider, node: fx.Node, have: Divided) -> fx.Node | None:
    """Return a device's part of the mask that attention is given, if it is given one."""
    given = argument(node, 3, "attn_mask")
    if not isinstance(given, fx.Node):
        return None
    return d.to(given, aligned(d, given, have, ATTENTION_RANK), varies=True)


def _causal(d: Divider, scores: fx.Node) -> fx.Node:
    """Return which keys each query attends to under a causal mask."""
    example = scores.meta["example_value"]
    options: dict[str, Argument] = {"dtype": None, "device": example.device}
    rows = d.emit(aten.arange.default, (_size(scores, -2),), options)
    columns = d.emit(aten.arange.default, (_size(scores, -1),), options)
    return d.emit(aten.ge.Tensor, (d.emit(aten.unsqueeze.default, (rows, 1)), columns))


def _size(node: fx.Node, dim: int) -> int:
    return int(node.meta["example_value"].shape[dim])


RULES: dict[object, Rule] = {
    aten.rand_like.default: alike,
    aten.randn_like.default: alike,
}
