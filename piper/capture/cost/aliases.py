"""Finds which values of a traced graph share memory, and which are free to recompute."""

import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx

from piper.capture.trace.effects import draws, is_tagged

_aten = torch.ops.aten
_MEMORY = "memory"
_FUSED = (_aten.cat.default, _aten._to_copy.default, _aten.constant_pad_nd.default)
_SUMS = (
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.dim,
    _aten.amax.default,
    _aten.var_mean.correction,
)


def tensors_in(node: fx.Node) -> Sequence[Tensor]:
    """Return the fake tensors that a node makes."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        return [item for item in value if isinstance(item, Tensor)]
    return ()


def label_memory(graph: fx.Graph) -> None:
    """Note on each node in which memory its tensors live, so that a copy of the node can live elsewhere."""
    for node in graph.nodes:
        node.meta[_MEMORY] = tuple(tensor.untyped_storage()._cdata for tensor in tensors_in(node))


def memories(node: fx.Node) -> tuple[int, ...]:
    """Return the storage id of each tensor that a node makes."""
    storage_ids: tuple[int, ...] = node.meta[_MEMORY]
    return storage_ids


def storages(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors that nodes make, each with its storage id."""
    for node in nodes:
        yield from zip(memories(node), tensors_in(node), strict=True)


def move_to(node: fx.Node, memory: tuple[int, ...]) -> None:
    """Let a node's tensors live in the given memory."""
    node.meta[_MEMORY] = memory


def memory_of(node: fx.Node) -> int:
    """Return the storage id of a node that makes one tensor."""
    (storage_id,) = memories(node)
    return storage_id


def is_view(node: fx.Node) -> bool:
    """Return whether a node makes only views of its arguments."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    own = set(memories(node))
    return bool(own) and own <= {memory for source in node.all_input_nodes for memory in memories(source)}


def recomputable(node: fx.Node) -> bool:
    """Return whether a value is free to recompute: a view, a constant, or a filled tensor."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return recomputable(node.all_input_nodes[0])
    if not node.all_input_nodes:
        return not draws(node)
    return node.target is _aten.lift_fresh_copy.default or is_view(node)


def takes_one(node: fx.Node) -> bool:
    """Return whether a node only takes one result of an operation with several."""
    return node.target is operator.getitem


def cheap(node: fx.Node) -> bool:
    """Return whether a compiler can fuse an operation with its neighbours: pointwise, a copy or a pad."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or draws(node):
        return False
    return is_tagged(target, torch.Tag.pointwise) or target in _FUSED


def fuses_arguments(node: fx.Node) -> bool:
    """Return whether a compiler can fuse the producers of an operation's arguments into it."""
    return cheap(node) or node.target in _SUMS


def memory_readers(node: fx.Node, readers: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the `readers` of a value, or of its views, that cannot be fused and need it in memory."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if tensors_in(user) and (recomputable(user) or takes_one(user)):
                stack.append(user)
            elif readers(user) and not fuses_arguments(user):
                yield user
