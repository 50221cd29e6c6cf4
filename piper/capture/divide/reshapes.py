"""Operations that only reshape, and what a node of an undivided forward computes."""

import torch
from torch import fx

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
    """Return what a node of an undivided forward computes, as fakes."""
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")
