"""Estimates what a phase costs: arithmetic, memory traffic, and memory that only lives while it runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from piper.capture.aliases import is_view, memories, memory_of, tensors_in
from piper.capture.partition import Section
from piper.capture.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one phase costs, on balanced sizes."""

    flops: int
    bytes_moved: int
    workspace: int


def cost_of(section: Section, sizes: Sizes) -> Cost:
    """Add up the operations of a phase."""
    flops = moved = 0
    for node in section.body:
        if isinstance(node.target, torch._ops.OpOverload) and not is_view(node):
            flops += _flops(node, sizes)
            moved += _traffic(node, sizes)
    return Cost(flops=flops, bytes_moved=moved, workspace=_workspace(section, sizes))


def _traffic(node: fx.Node, sizes: Sizes) -> int:
    read = sum(sizes.nbytes(tensor) for source in node.all_input_nodes for tensor in tensors_in(source))
    return read + sum(sizes.nbytes(tensor) for tensor in tensors_in(node))


def _flops(node: fx.Node, sizes: Sizes) -> int:
    """The operation's multiplications and additions, by torch's own table."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if target.name().startswith("piper::grouped_mm"):
        return _grouped_flops(node, sizes)
    if "_scaled_dot_product_" in target.name():
        return _attention_flops(node, sizes, backward="backward" in target.name())
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0

    def shaped(argument: Any) -> Any:  # noqa: ANN401  an argument is anything
        # The formulas ask for nothing but shapes.
        value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
        return torch.Size(sizes.shape(value)) if isinstance(value, Tensor) else value

    arguments = [fx.node.map_aggregate(argument, shaped) for argument in node.args]
    named = {key: fx.node.map_aggregate(argument, shaped) for key, argument in node.kwargs.items()}
    result = fx.node.map_aggregate(node.meta["val"], shaped)
    return int(formula(*arguments, **named, out_val=result))


def _grouped_flops(node: fx.Node, sizes: Sizes) -> int:
    """A row of an expert region meets one expert: rows x d x f, whatever the number of experts."""
    first, second = (sizes.shape(source.meta["val"]) for source in node.all_input_nodes[:2])
    made = sizes.shape(node.meta["val"])
    rows, width = first
    return 2 * rows * width * (second[-1] if len(made) == 3 else made[1])


def _attention_flops(node: fx.Node, sizes: Sizes, *, backward: bool) -> int:
    """Two products forward, scores and values; five backward, where the scores are made again."""
    sources = [source for source in node.args if isinstance(source, fx.Node)]
    query, key, value = (sizes.shape(source.meta["val"]) for source in sources[backward : backward + 3])
    batch, heads, length, width = query
    scores = 2 * batch * heads * length * key[2]
    return scores * (3 * width + 2 * value[3] if backward else width + value[3])


def _workspace(section: Section, sizes: Sizes) -> int:
    """The most bytes that live at once and are neither read nor returned."""
    outside = {memory_of(node) for node in [*section.read_nodes, *(write.node for write in section.writes)]}
    bytes_of: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(section.body):
        for storage, tensor in _storages([node, *node.all_input_nodes]):
            if storage not in outside:
                if storage not in bytes_of:
                    bytes_of[storage] = sizes.storage_bytes(tensor)
                first.setdefault(storage, position)
                last[storage] = position
    return peak(len(section.body), bytes_of, first, last)


def peak(length: int, size: Mapping[int, int], first: Mapping[int, int], last: Mapping[int, int]) -> int:
    """The most bytes alive at one of `length` positions."""
    change: list[int] = [0] * (length + 1)
    for storage, nbytes in size.items():
        change[first[storage]] += nbytes
        change[last[storage] + 1] -= nbytes
    most = alive = 0
    for step in change:
        alive += step
        most = max(most, alive)
    return most


def _storages(nodes: Sequence[fx.Node]) -> Iterable[tuple[int, Tensor]]:
    for node in nodes:
        yield from zip(memories(node), tensors_in(node), strict=True)
