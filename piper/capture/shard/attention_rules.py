"""Rules for attention: sharded by heads, or by the sequence with keys and values from every device."""

import operator

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from piper.capture.shard.axis_sharding import NoRuleError, UnevenError
from piper.capture.shard.compute_rules import aligned
from piper.capture.shard.draws import attend_and_drop, causal_mask, mask_of
from piper.capture.shard.layout import divides
from piper.capture.shard.masks import is_causal, unrepeated
from piper.capture.shard.ring import by_ring, scale_of
from piper.capture.shard.shape_rules import argument
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import draws
from piper.ir.sharding import REPLICATE, Shard

HEADS, SEQUENCE = 1, 2  # dimensions of [batch, heads, sequence, head size]


def attention(d: Sharder, node: fx.Node) -> None:
    """Attend: with all operands sharded by heads or samples, else by the sequence as the directive says."""
    query, key, value = node.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    layouts = [d.settle(x) for x in (query, key, value)]
    have = next((layout for layout in layouts if isinstance(layout, Shard)), None)
    if have is None:  # the mask alone is sharded
        d.plain(node)
        return
    if have.dim != SEQUENCE:
        _alike(d, node, query, key, value, have)
    elif d.sharding.attention == "ring":
        by_ring(d, node, query, key, value, have)
    elif d.sharding.attention == "heads":
        _by_heads_for_a_while(d, node, query, key, value, have)
    else:
        _by_queries(d, node, query, key, value, have)


def _alike(d: Sharder, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Shard) -> None:
    """Attend on a device's own heads or samples."""
    if have.dim > HEADS:
        raise NoRuleError("it is sharded along the size of a head")
    for x in (query, key, value):
        if not divides(size := d.shape(x)[have.dim], have, d.degree):
            raise UnevenError(f"{size} heads", size, d.degree)
    local = [d.to(x, have, varies=True) for x in (query, key, value)]
    d.done(node, _attend(d, node, local, have), have)


def _attend(
    d: Sharder, node: fx.Node, local: list[fx.Node], have: Shard, mask: fx.Node | None = None
) -> fx.Node:
    mask = mask or mask_of(d, node, have)
    if draws(node):
        return attend_and_drop(d, node, local, have, mask)
    causal = bool(argument(node, 5, "is_causal", False)) and mask is None
    kwargs: dict[str, Argument] = {n: node.kwargs[n] for n in ("scale", "enable_gqa") if n in node.kwargs}
    return d.emit(node.target, (*local, mask, 0.0, causal), kwargs)


def _by_heads_for_a_while(
    d: Sharder, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Shard
) -> None:
    """Exchange the sequence for the heads, attend, and exchange back."""
    heads = Shard(HEADS, d.sharding.inner)  # so a device of an inner group has some of its own heads
    if not all(divides(d.shape(x)[HEADS], heads, d.degree) for x in (query, key, value)):
        heads = Shard(HEADS)
    for x in (query, key, value):
        if not divides(size := d.shape(x)[HEADS], heads, d.degree):
            raise UnevenError(f"{size} heads", size, d.degree)
    local = [d.to(x, heads, varies=True) for x in (query, key, value)]
    d.done(node, _attend(d, node, local, heads), heads)
    back = d.to(node, have, varies=True)
    d.done(node, back, have)


def _by_queries(d: Sharder, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Shard) -> None:
    """Attend from a device's own queries to the keys and values of all devices."""
    own = d.to(query, have, varies=True)
    lengths = [d.shape(x)[SEQUENCE] for x in (query, key)]
    if not is_causal(node) or have.blocks > 1 or lengths[0] != lengths[1] or draws(node):
        rows = None
        if argument(node, 5, "is_causal", False):
            rows = d.take(causal_mask(d, *lengths), have.at(0))
        local = [own, d.to(key, REPLICATE, varies=True), d.to(value, REPLICATE, varies=True)]
        d.done(node, _attend(d, node, local, have, rows), have)
        return
    keys, values = (d.to(unrepeated(d, x), REPLICATE, varies=True) for x in (key, value))
    how = (d.host_place(), scale_of(d, node), d.degree, have.zigzag)
    both = d.emit(torch.ops.piper.attend_prefix.default, (own, keys, values, *how))
    d.done(node, d.emit(operator.getitem, (both, 0)), have)


def by_heads(d: Sharder, node: fx.Node) -> None:
    """Shard attention that is sharded by the sequence already: by heads."""
    sources = [x for x in node.all_input_nodes if len(d.shape(x)) > 1]
    have = next(layout for x in sources if isinstance(layout := d.settle(x), Shard))
    if have.dim != HEADS:
        raise NoRuleError("attention that is sharded by the sequence is sharded by heads alone")
    for x in sources:
        if d.shape(x)[HEADS] != 1 and not divides(size := d.shape(x)[HEADS], have, d.degree):
            raise UnevenError(f"{size} heads", size, d.degree)
    local = {x: d.to(x, aligned(d, x, have, len(d.shape(x))), varies=True) for x in sources}
    local |= {x: d.local[x] for x in node.all_input_nodes if x not in local}
    made = d.emit(node.target, map_arg(node.args, local.__getitem__), node.kwargs)
    d.done(node, made, have if isinstance(made.meta["example_value"], Tensor) else [have, have])


RULES: dict[object, Rule] = {
    aten.scaled_dot_product_attention.default: attention,
    torch.ops.piper.attend_prefix.default: by_heads,
    torch.ops.piper.ring_attend.default: by_heads,
    torch.ops.piper.ring_pass.default: by_heads,
}
