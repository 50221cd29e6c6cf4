"""Nodes of the captured graph that become chunks without code: ends of expert regions, and collectives.

A collective stands in the graph as a call of one function here, so the function runs on fakes alone: it gives
the shape, and whether autograd needs a gradient. A `Collective` says what the group does, forward and
backward.
"""

from typing import Literal

from torch import Tensor, fx

from piper.ir.chunk import Collective

Marker = Literal["route", "unroute", "collective"]
OWN_ROWS = "axes of own rows"  # of a route's meta: axes along which each device routes rows of its own


def collective(value: Tensor, how: Collective) -> Tensor:
    """Stand for a collective: return a new value of the shape that it gives."""
    shape = list(value.shape)
    if how.joined is not None:
        shape[how.joined.dim] *= how.degree
    if how.cut is not None:
        shape[how.cut.dim] //= how.degree
    result = value.new_empty(shape)
    return result.requires_grad_(value.requires_grad and how.op != "max")


def is_collective(node: fx.Node) -> bool:
    """Return whether a node of the captured graph is a collective."""
    return node.op == "call_function" and node.target is collective


def how_of(node: fx.Node) -> Collective:
    """Return what a collective does."""
    how = node.args[1]
    assert isinstance(how, Collective)
    return how


def marker(node: fx.Node) -> Marker | None:
    """Return what a node that becomes a chunk of its own is: an end of an expert region, or a collective."""
    if is_collective(node):
        return "collective"
    if node.op == "call_function":
        name = str(node.target)  # by name: the operations live outside this package
        if name in ("piper.route.default", "piper.route"):
            return "route"
        if name in ("piper.unroute.default", "piper.unroute"):
            return "unroute"
    return None
