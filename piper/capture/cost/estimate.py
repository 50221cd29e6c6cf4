"""Estimates the cost of a phase: arithmetic, memory traffic, and temporary memory."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from piper.capture.cost.aliases import cheap, memories, read_from_memory, storages
from piper.capture.cost.fused_kernels import FLEX, Traffic, fused, kernel_of, operations, product_shape
from piper.capture.cost.section import Section
from piper.capture.cost.workspace import workspace_of
from piper.capture.trace.effects import argument
from piper.capture.trace.sizes import SymbolicSizes
from piper.ir.chunk import Kernel

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one phase, with balanced sizes."""

    flops: int
    bytes_moved: int
    workspace: int  # peak bytes beyond arguments and results; negative if these never coexist
    kernels: tuple[Kernel, ...] = ()


def cost_of(
    section: Section,
    sizes: SymbolicSizes,
    *,
    compiled: bool = False,
    lasting: Collection[fx.Node] = (),
    given: Collection[fx.Node] = (),
) -> Cost:
    """Add up the operations of a phase.

    compiled: a compiler fuses cheap operations with their readers, so the values between them need no memory.
    lasting: values that a later phase reads again. given: results whose memory is there from the start.
    """
    fleeting = _fleeting(section) if compiled else None
    groups: list[Sequence[fx.Node]] = [[node] for node in operations(section.body)]
    if fleeting is not None:
        groups = fused(section.body, fleeting, section.writers)
    traffic = Traffic(section.body, sizes, fleeting or ())
    kernels = tuple(
        kernel_of(group, sum(flops_of(node, sizes) for node in group), traffic.of(group), sizes)
        for group in groups
    )
    return Cost(
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
        if fusible and not read_from_memory(node, in_memory):
            storage_ids |= set(memories(node)) - written
    return storage_ids


def _one_hot(node: fx.Node) -> bool:
    """Return whether a node writes one number into each row of a constant, as the gradient of a loss does.

    Inductor computes such a result from the places, where it is read.
    """
    if node.target is not _aten.scatter.value:
        return False
    start, axis, places = node.args[:3]
    assert isinstance(start, fx.Node) and isinstance(axis, int) and isinstance(places, fx.Node)
    shape = [*start.meta["val"].shape]
    shape[axis] = 1
    constant = start.target is _aten.full.default and len(start.users) == 1
    return constant and [*places.meta["val"].shape] == shape


def traffic_of(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the bytes an operation reads and writes."""
    return sum(sizes.nbytes(tensor) for _, tensor in storages([node, *node.all_input_nodes]))


def flops_of(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the floating-point operations of a node, by torch's own table."""
    target = node.target
    if target in FLEX:
        return _sparse_flops(node, sizes, backward=target is FLEX[1])
    assert isinstance(target, torch._ops.OpOverload)
    if "_varlen_attn" in target.name():
        return _sparse_flops(node, sizes, backward="backward" in target.name())
    if target.name().startswith(("piper::grouped_mm", "piper::fp8_grouped_mm")):
        return _grouped_flops(node, sizes)
    if target.name() in ("piper::fp8_mm", "aten::_scaled_mm"):
        return 2 * math.prod(product_shape(node, sizes))
    if "_scaled_dot_product_" in target.name():
        return _attention_flops(node, sizes, backward="backward" in target.name())
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


def _grouped_flops(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the floating-point operations of a grouped matrix product.

    Each row meets one expert: rows x d x f, for any number of experts.
    """
    first, second = (sizes.shape(source.meta["val"]) for source in node.all_input_nodes[:2])
    result = sizes.shape(node.meta["val"])
    rows, width = first
    return 2 * rows * width * (second[-1] if len(result) == 3 else result[1])


def _attention_flops(node: fx.Node, sizes: SymbolicSizes, *, backward: bool) -> int:
    """Return the floating-point operations of attention.

    The forward has two products, scores and values. The backward has five, because it recomputes the scores.
    Causal attention computes only the scores of earlier tokens.
    """
    sources = [source for source in node.args if isinstance(source, fx.Node)]
    query, key, value = (sizes.shape(source.meta["val"]) for source in sources[backward : backward + 3])
    batch, heads, length, width = query
    causal = bool(argument(node, "is_causal", False))  # a mask counts as no saving
    scores = 2 * batch * heads * pairs_of_tokens(length, key[2], causal=causal)
    return scores * (3 * width + 2 * value[3] if backward else width + value[3])


def _sparse_flops(node: fx.Node, sizes: SymbolicSizes, *, backward: bool) -> int:
    """Return the floating-point operations of attention that skips keys, as if it skipped none.

    What is skipped depends on the data.
    """
    packed = node.target not in FLEX  # [tokens, heads, head size], after the gradient in a backward
    first = int(packed and backward)
    operands = [source for source in node.args[first : first + 3] if isinstance(source, fx.Node)]
    query, key, value = (sizes.shape(source.meta["val"]) for source in operands)
    keys = node.args[9 if backward else 6] if packed else key[2]  # in the longest document
    assert isinstance(keys, int)
    scores = 2 * math.prod(query[:-1]) * keys
    return scores * (3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1])


def pairs_of_tokens(queries: int, keys: int, *, causal: bool) -> int:
    """Return how many pairs of a query and a key attention looks at.

    >>> pairs_of_tokens(4, 4, causal=False), pairs_of_tokens(4, 4, causal=True)
    (16, 10)
    """
    if not causal:
        return queries * keys
    short = min(queries, keys)
    return short * (short + 1) // 2 + (queries - short) * keys
