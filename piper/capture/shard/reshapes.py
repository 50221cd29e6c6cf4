"""Operations that only reshape, and what a node of an unsharded forward computes."""

import operator

import torch
from torch import Tensor, fx

from piper.capture.trace.graph_walks import reached

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
