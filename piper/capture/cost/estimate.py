"""Estimates the cost of a phase: its kernels, their arithmetic and memory traffic, and temporary memory."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from piper.capture.cost.aliases import (
    cheap,
    fuses_arguments,
    is_view,
    memories,
    memory_readers,
    storages,
    tensors_in,
)
from piper.capture.cost.workspace import Section, workspace_of
from piper.capture.precision.fp8 import fp8_mm
from piper.capture.trace.effects import argument
from piper.capture.trace.sizes import SymbolicSizes, dtype_name
from piper.ir.chunk import Kernel, PhaseSpec
from piper.ir.grouping import grouped

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


def cost_of(
    section: Section,
    sizes: SymbolicSizes,
    *,
    compiled: bool = False,  # cheap operations are fused: values between them need no memory
    lasting: Collection[fx.Node] = (),  # values that a later phase reads again
    given: Collection[fx.Node] = (),  # results whose memory is there from the start
) -> PhaseSpec:
    """Add up the operations of a phase, with balanced sizes, in a spec that says only what they cost."""
    fleeting = _fleeting(section) if compiled else None
    groups: list[Sequence[fx.Node]] = [[node] for node in section.body if _computes(node)]
    if fleeting is not None:
        groups = _fused(section.body, fleeting, section.writers)
    makers: dict[int, fx.Node] = {}
    for node in section.body:
        for memory in memories(node) if _computes(node) else ():
            makers.setdefault(memory, node)
    kernels = tuple(
        _kernel_of(group, _bytes_moved(group, makers, sizes, fleeting or ()), sizes) for group in groups
    )
    return PhaseSpec(
        flops=sum(kernel.flops for kernel in kernels),
        bytes_moved=sum(kernel.nbytes for kernel in kernels),
        workspace=workspace_of(section, sizes, fleeting, lasting, given),
        kernels=kernels,
    )


def _fleeting(section: Section) -> set[int]:
    """Return the storages that a compiled phase never allocates, because their producers are fused."""
    body = set(section.body)
    written = {memory for write in section.writes for memory in memories(write.node)}
    storage_ids: set[int] = set()

    def in_memory(reader: fx.Node) -> bool:
        return reader in body and reader.target is not _aten.gather.default and not _one_hot(reader)

    for node in section.body:
        fusible = cheap(node) or _one_hot(node) or any(map(_one_hot, node.users))
        if fusible and not any(memory_readers(node, in_memory)):
            storage_ids |= set(memories(node)) - written
    return storage_ids


def _one_hot(node: fx.Node) -> bool:
    """Return whether a node writes one number into each row of a constant, as the gradient of a loss does."""
    # Inductor computes such a result from the places, where it is read.
    if node.target is not _aten.scatter.value:
        return False
    start, axis, places = node.args[:3]
    assert isinstance(start, fx.Node) and isinstance(axis, int) and isinstance(places, fx.Node)
    shape = [*start.meta["val"].shape]
    shape[axis] = 1
    constant = start.target is _aten.full.default and len(start.users) == 1
    return constant and [*places.meta["val"].shape] == shape


def flops_of(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the floating-point operations of a node, by torch's own table."""
    target = node.target
    if target in FLEX or "_varlen_attn" in str(target) or "_scaled_dot_product_" in str(target):
        return _attention_flops(node, sizes)
    assert isinstance(target, torch._ops.OpOverload)
    if target.name().startswith(("piper::grouped_mm", "piper::fp8_grouped_mm")):
        # Each row meets one expert: rows x d x f, for any number of experts.
        (rows, width), second = (sizes.shape(source.meta["val"]) for source in node.all_input_nodes[:2])
        result = sizes.shape(node.meta["val"])
        return 2 * rows * width * (second[-1] if len(result) == 3 else result[1])
    if target.name() in ("piper::fp8_mm", "aten::_scaled_mm"):
        return 2 * math.prod(_product_shape(node, sizes))
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0

    def shaped(argument: Any) -> Any:  # noqa: ANN401  an argument is anything
        # The formulas need only shapes.
        value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
        return torch.Size(sizes.shape(value)) if isinstance(value, Tensor) else value

    arguments = [fx.node.map_aggregate(argument, shaped) for argument in node.args]
    named = {key: fx.node.map_aggregate(argument, shaped) for key, argument in node.kwargs.items()}
    result = fx.node.map_aggregate(node.meta["val"], shaped)
    return int(formula(*arguments, **named, out_val=result))


def _attention_flops(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the floating-point operations of attention: of all keys, where those skipped depend on data."""
    # The forward has two products, scores and values. The backward has five: it recomputes the scores.
    # Causal attention computes only the scores of earlier tokens.
    named = [argument(node, name) for name in ("query", "key", "value")]
    operands = [
        each for each in (node.args[:3] if node.target in FLEX else named) if isinstance(each, fx.Node)
    ]
    query, key, value = (sizes.shape(each.meta["val"]) for each in operands)
    backward = "backward" in str(node.target)
    if len(query) == 3:  # documents end to end: tokens, heads, head size
        keys = node.args[9 if backward else 6]  # in the longest document
        assert isinstance(keys, int)
        pairs = query[0] * query[1] * keys
    else:
        causal = bool(argument(node, "is_causal", False))  # a mask counts as no saving
        pairs = query[0] * query[1] * pairs_of_tokens(query[2], key[2], causal=causal)
    return 2 * pairs * (3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1])


def pairs_of_tokens(queries: int, keys: int, *, causal: bool) -> int:
    """Return how many pairs of a query and a key attention looks at.

    >>> pairs_of_tokens(4, 4, causal=False), pairs_of_tokens(4, 4, causal=True)
    (16, 10)
    """
    if not causal:
        return queries * keys
    short = min(queries, keys)
    return short * (short + 1) // 2 + (queries - short) * keys


def _computes(node: fx.Node) -> bool:
    """Return whether a node computes something: all but views do."""
    known = isinstance(node.target, torch._ops.OpOverload) or node.target in FLEX
    return known and not is_view(node)


def _fused(
    body: Sequence[fx.Node], fleeting: set[int], writers: Mapping[fx.Node, fx.Node]
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
        sources = {*node.all_input_nodes, *writers.get(node, node).all_input_nodes} & depth.keys()
        depth[node] = max((depth[source] + (not _mixes(source)) for source in sources), default=0)
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
    groups = grouped((lead(node), node) for node in leader).values()
    return [group for group in groups if not fleeting.issuperset(m for node in group for m in memories(node))]


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


def _bytes_moved(
    group: Sequence[fx.Node], makers: Mapping[int, fx.Node], sizes: SymbolicSizes, fleeting: Collection[int]
) -> int:
    """Return the bytes that a kernel reads and writes: each storage once."""
    # A value that is never allocated is computed again from what its producer, one of `makers`, reads.

    def nbytes(tensor: Tensor) -> int:
        return min(sizes.nbytes(tensor), sizes.storage_bytes(tensor))  # an expanded one has more elements

    inside = {memory for node in group for memory in memories(node)}
    moved: dict[int, int] = {}
    seen, stack = set(group), list(group)
    while stack:
        for memory, tensor in storages(stack.pop().all_input_nodes):
            if memory in fleeting:
                producer = makers.get(memory)
                if producer is not None and producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
            elif memory not in inside:
                moved[memory] = max(moved.get(memory, 0), nbytes(tensor))
    for memory, tensor in storages(group):
        if memory not in fleeting:
            moved[memory] = moved.get(memory, 0) + nbytes(tensor)
    return sum(moved.values())


def _kernel_of(group: Sequence[fx.Node], nbytes: int, sizes: SymbolicSizes) -> Kernel:
    """Describe a kernel by its most costly operation."""
    node, flops = group[0], sum(flops_of(each, sizes) for each in group)
    if not flops:
        return Kernel(kind="traffic", dtype=_type_of(node), nbytes=nbytes)
    attends = argument(node, "query") is not None and argument(node, "key") is not None
    return Kernel(
        kind="attention" if attends else "product",
        dtype=_type_of(node),
        flops=flops,
        nbytes=nbytes,
        shape=_attention_shape(node, sizes) if attends else _product_shape(node, sizes),
    )


def _type_of(node: fx.Node) -> str:
    """Return the type that an operation computes in: that of its first floating-point argument or result."""
    for source in (*node.all_input_nodes, node):
        for tensor in tensors_in(source):
            if tensor.is_floating_point():
                return dtype_name(tensor.dtype)
    return "float32"


def _product_shape(node: fx.Node, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return how many products a node computes, and the rows, columns and depth of each. Empty: not known."""
    at = _PRODUCTS.get(node.target)  # type: ignore[call-overload]
    if at is None:
        return ()
    first, second = node.args[at], node.args[at + 1]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    left, right = sizes.shape(first.meta["val"]), sizes.shape(second.meta["val"])
    return (left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1])


def _attention_shape(node: fx.Node, sizes: SymbolicSizes) -> tuple[int, ...]:
    """Return the number of heads of all samples, the queries, the keys, and the width of a head."""
    query, key = argument(node, "query"), argument(node, "key")
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    shape = sizes.shape(query.meta["val"])
    if len(shape) == 3:  # documents end to end
        return shape[1], shape[0], sizes.shape(key.meta["val"])[0], shape[2]
    batch, heads, length, width = shape
    return batch * heads, length, sizes.shape(key.meta["val"])[2], width
