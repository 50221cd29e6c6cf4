"""Finds the kernels that a phase runs: one for each operation, or for each group that a compiler fuses."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from piper.capture.cost.aliases import cheap, fuses_arguments, is_view, memories, storages, tensors_in
from piper.capture.precision.fp8 import fp8_mm
from piper.capture.trace.effects import argument
from piper.capture.trace.sizes import SymbolicSizes, dtype_name
from piper.ir.chunk import Kernel

_aten = torch.ops.aten
_SUMS = (_aten.sum.dim_IntList, _aten.mean.dim)
_PRODUCTS = {  # where the two factors stand among the arguments
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_mm.default: 0,
    fp8_mm._opoverload: 0,
}


FLEX = (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward)


def operations(body: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a phase that compute something: all but views."""
    return [node for node in body if _computes(node)]


def _computes(node: fx.Node) -> bool:
    known = isinstance(node.target, torch._ops.OpOverload) or node.target in FLEX
    return known and not is_view(node)


def fused(
    body: Sequence[fx.Node], fleeting: Collection[int], writers: Mapping[fx.Node, fx.Node]
) -> list[Sequence[fx.Node]]:
    """Group the operations of a compiled phase into kernels, in the order of their first operations.

    Operations that can be fused are in one kernel if one reads the other and no kernel must run in between.
    A sum over rows is a kernel of its own, which computes its arguments again.
    fleeting: the storages that the phase never allocates. A group that makes nothing else is no kernel: those
    who read its results compute them again.
    writers: values that are written in the kernel of another result.
    """
    maker: dict[int, fx.Node] = {}
    leader: dict[fx.Node, fx.Node] = {}
    depth: dict[fx.Node, int] = {}  # kernels that must have run before

    def lead(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for node in body:
        depth[node] = _depth(depth, {*node.all_input_nodes, *writers.get(node, node).all_input_nodes})
        if not _computes(node):
            continue
        leader[node] = node
        for source in node.all_input_nodes if _mixes(node) else ():
            for memory in memories(source):
                producer = maker.get(memory)
                if producer is not None and _mixes(producer) and depth[producer] == depth[node]:
                    leader[lead(node)] = lead(producer)
        for memory in memories(node):
            maker.setdefault(memory, node)
    for value, writer in writers.items():
        leader[lead(value)] = lead(writer)
    groups = _grouped(leader, lead)
    return [group for group in groups if any(set(memories(node)) - set(fleeting) for node in group)]


def _grouped(nodes: Iterable[fx.Node], lead: Callable[[fx.Node], fx.Node]) -> Collection[Sequence[fx.Node]]:
    """Return the nodes in groups with one leader each, in the order of their first nodes."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(lead(node), []).append(node)
    return groups.values()


def _depth(depth: Mapping[fx.Node, int], sources: Collection[fx.Node]) -> int:
    """Return how many kernels must have run before an operation on the sources."""
    return max((depth[source] + (not _mixes(source)) for source in sources if source in depth), default=0)


def _mixes(node: fx.Node) -> bool:
    """Return whether an operation is fused with those that it reads and with those that read it."""
    if not _computes(node):
        return True
    return fuses_arguments(node) and not _over_rows(node)


def _over_rows(node: fx.Node) -> bool:
    """Return whether a sum leaves the last dimension, so that rows of many processors are added up."""
    if cheap(node):
        return False
    if node.target not in _SUMS:
        return True
    source = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    return not isinstance(dims, list | tuple) or any(
        isinstance(dim, int) and dim % source.dim() != source.dim() - 1 for dim in dims
    )


class Traffic:
    """Counts the bytes that kernels of one phase read and write."""

    def __init__(self, body: Sequence[fx.Node], sizes: SymbolicSizes, fleeting: Collection[int]) -> None:
        self.sizes, self.fleeting = sizes, fleeting
        self.maker: dict[int, fx.Node] = {}
        for node in operations(body):
            for memory in memories(node):
                self.maker.setdefault(memory, node)

    def of(self, group: Sequence[fx.Node]) -> int:
        """Return the bytes that a kernel reads and writes: each storage once.

        A value that is never allocated is computed again from what its producer reads.
        """
        inside = {memory for node in group for memory in memories(node)}
        moved: dict[int, int] = {}
        seen, stack = set(group), list(group)
        while stack:
            node = stack.pop()
            for memory, tensor in storages(node.all_input_nodes):
                if memory in self.fleeting:
                    producer = self.maker.get(memory)
                    if producer is not None and producer not in seen:
                        seen.add(producer)
                        stack.append(producer)
                elif memory not in inside:
                    moved[memory] = max(moved.get(memory, 0), self._bytes(tensor))
        for memory, tensor in storages(group):
            if memory not in self.fleeting:
                moved[memory] = moved.get(memory, 0) + self._bytes(tensor)
        return sum(moved.values())

    def _bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor that lie in memory: an expanded one has more elements than that."""
        return min(self.sizes.nbytes(tensor), self.sizes.storage_bytes(tensor))


def kernel_of(group: Sequence[fx.Node], flops: int, nbytes: int, sizes: SymbolicSizes) -> Kernel:
    """Describe a kernel by its most costly operation."""
    node = group[0]
    if not flops:
        return Kernel(kind="traffic", dtype=_type_of(node), nbytes=nbytes)
    attends = argument(node, "query") is not None and argument(node, "key") is not None
    return Kernel(
        kind="attention" if attends else "product",
        dtype=_type_of(node),
        flops=flops,
        nbytes=nbytes,
        shape=attention_shape(node, sizes) if attends else product_shape(node, sizes),
    )


def _type_of(node: fx.Node) -> str:
    """Return the type that an operation computes in: that of its first floating-point argument or result."""
    for source in (*node.all_input_nodes, node):
        for tensor in tensors_in(source):
            if tensor.is_floating_point():
                return dtype_name(tensor.dtype)
    return "float32"


def product_shape(node: fx.Node, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return how many products a node computes, and the rows, columns and depth of each. Empty: not known."""
    at = _PRODUCTS.get(node.target)  # type: ignore[call-overload]
    if at is None:
        return ()
    first, second = node.args[at], node.args[at + 1]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    left, right = sizes.shape(first.meta["val"]), sizes.shape(second.meta["val"])
    return (left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1])


def attention_shape(node: fx.Node, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return the number of heads of all samples, the queries, the keys, and the width of a head."""
    query, key = argument(node, "query"), argument(node, "key")
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    shape = sizes.shape(query.meta["val"])
    if len(shape) == 3:  # documents end to end
        return shape[1], shape[0], sizes.shape(key.meta["val"])[0], shape[2]
    batch, heads, length, width = shape
    return batch * heads, length, sizes.shape(key.meta["val"])[2], width
