"""Tells which values of a traced graph share memory, and which cost nothing to make again."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

_aten = torch.ops.aten


def tensors_in(node: fx.Node) -> Sequence[Tensor]:
    """The fake tensors that a node makes."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return [part for part in value if isinstance(part, Tensor)]
    return ()


def storage_of(node: fx.Node) -> int | None:
    """The identity of the memory that a node's tensor lives in."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def is_view(node: fx.Node) -> bool:
    """Whether a node only shows memory that an argument already has."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    made = {tensor.untyped_storage()._cdata for tensor in tensors_in(node)}
    read = {
        tensor.untyped_storage()._cdata for source in node.all_input_nodes for tensor in tensors_in(source)
    }
    return bool(made) and made <= read


def recomputable(node: fx.Node) -> bool:
    """Whether making a value again is as good as keeping it: a view, a constant, a filled tensor."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return recomputable(node.all_input_nodes[0])
    if not node.all_input_nodes:
        return not draws_random(node)
    return node.target is _aten.lift_fresh_copy.default or is_view(node)


def draws_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
