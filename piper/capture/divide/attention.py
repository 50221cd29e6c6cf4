"""Rules for attention: divided by heads, or by the sequence with keys and values from every device."""

import torch
from torch import fx
from torch.fx.node import Argument

from piper.capture.divide.compute import aligned
from piper.capture.divide.divider import Divider, Rule, aten
from piper.capture.divide.division import NoRuleError, UnevenError
from piper.capture.divide.layout import WHOLE, Divided, divides
from piper.capture.divide.shapes import argument

HEADS, SEQUENCE = 1, 2  # dimensions of [batch, heads, sequence, head size]


def attention(d: Divider, node: fx.Node) -> None:
    """Attend: with all operands divided by heads or samples, else by the sequence as the directive says."""
    query, key, value = node.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    layouts = [d.settle(x) for x in (query, key, value)]
    have = next((layout for layout in layouts if isinstance(layout, Divided)), None)
    if have is None:  # the mask alone is divided
        d.plain(node)
        return
    if float(argument(node, 4, "dropout_p", 0.0)):  # type: ignore[arg-type]
        raise NoRuleError("dropout inside attention draws for all heads at once")
    if have.dim == SEQUENCE and d.division.attention == "heads":
        _by_heads_for_a_while(d, node, query, key, value, have)
    elif have.dim == SEQUENCE:
        _by_queries(d, node, query, key, value, have)
    else:
        _alike(d, node, query, key, value, have)


def _alike(d: Divider, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Divided) -> None:
    """Attend on a device's own heads or samples."""
    if have.dim > HEADS:
        raise NoRuleError("it is divided along the size of a head")
    for x in (query, key, value):
        if not divides(size := d.shape(x)[have.dim], have, d.degree):
            raise UnevenError(f"{size} heads", size, d.degree)
    local = [d.to(x, have, varies=True) for x in (query, key, value)]
    d.done(node, _attend(d, node, local, have), have)


def _attend(
    d: Divider, node: fx.Node, local: list[fx.Node], have: Divided, mask: fx.Node | None = None
) -> fx.Node:
    given = argument(node, 3, "attn_mask")
    if mask is None and isinstance(given, fx.Node):
        mask = d.to(given, aligned(d, given, have, 4), varies=True)
    causal = bool(argument(node, 5, "is_causal", False)) and mask is None
    kwargs: dict[str, Argument] = {n: node.kwargs[n] for n in ("scale", "enable_gqa") if n in node.kwargs}
    return d.emit(node.target, (*local, mask, 0.0, causal), kwargs)


def _by_heads_for_a_while(
    d: Divider, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Divided
) -> None:
    """Exchange the sequence for the heads, attend, and exchange back."""
    heads = Divided(HEADS)
    for x in (query, key, value):
        if not divides(size := d.shape(x)[HEADS], heads, d.degree):
            raise UnevenError(f"{size} heads", size, d.degree)
    local = [d.to(x, heads, varies=True) for x in (query, key, value)]
    d.done(node, _attend(d, node, local, heads), heads)
    back = d.to(node, have, varies=True)
    d.done(node, back, have)


def _by_queries(
    d: Divider, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Divided
) -> None:
    """Attend from a device's own queries to the keys and values of all devices."""
    own = d.to(query, have, varies=True)
    local = [own, d.to(key, WHOLE, varies=True), d.to(value, WHOLE, varies=True)]
    mask = None
    if argument(node, 5, "is_causal", False) and not isinstance(argument(node, 3, "attn_mask"), fx.Node):
        device = own.meta["example_value"].device
        size = d.shape(query)[SEQUENCE]
        places = d.emit(aten.arange.default, (size,), {"dtype": torch.int64, "device": device})
        rows = d.emit(aten.unsqueeze.default, (d.take(places, have.at(0)), 1))
        mask = d.emit(aten.ge.Tensor, (rows, d.emit(aten.unsqueeze.default, (places, 0))))
    d.done(node, _attend(d, node, local, have, mask), have)


RULES: dict[object, Rule] = {aten.scaled_dot_product_attention.default: attention}
