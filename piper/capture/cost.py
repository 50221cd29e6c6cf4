"""Estimates what a phase costs: arithmetic, memory traffic, and memory that only lives while it runs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from piper.capture.aliases import cheap, is_view, memories, memory_of, read_from_memory, tensors_in
from piper.capture.partition import Section
from piper.capture.sizes import Sizes

_aten = torch.ops.aten
_WRITES_INTO = (
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten._unsafe_masked_index_put_accumulate.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_add.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one phase costs, on balanced sizes."""

    flops: int
    bytes_moved: int
    workspace: int  # at its peak, beyond all it is given and all it returns; below 0 where these never meet


def cost_of(
    section: Section, sizes: Sizes, *, joined: bool = False, lasting: Collection[fx.Node] = ()
) -> Cost:
    """Add up the operations of a phase.

    joined: a compiler joins cheap operations to the ones that read them: what lies between has no memory.
    lasting: values that a later phase reads again.
    """
    fleeting = _fleeting(section) if joined else None
    flops = moved = 0
    for node in section.body:
        if isinstance(node.target, torch._ops.OpOverload) and not is_view(node):
            flops += flops_of(node, sizes)
            moved += traffic_of(node, sizes, fleeting or ())
    return Cost(flops=flops, bytes_moved=moved, workspace=_workspace(section, sizes, fleeting, lasting))


def _fleeting(section: Section) -> set[int]:
    """The memory that a compiled phase does without."""
    body = set(section.body)
    written = {memory for write in section.writes for memory in memories(write.node)}
    found: set[int] = set()
    for node in section.body:
        if cheap(node) and not read_from_memory(node, body.__contains__):
            found |= set(memories(node)) - written
    return found


def traffic_of(node: fx.Node, sizes: Sizes, fleeting: Collection[int] = ()) -> int:
    """The bytes an operation reads and writes, but for what is never in memory."""
    return sum(
        sizes.nbytes(tensor)
        for storage, tensor in _storages([node, *node.all_input_nodes])
        if storage not in fleeting
    )


def flops_of(node: fx.Node, sizes: Sizes) -> int:
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


def _workspace(
    section: Section, sizes: Sizes, fleeting: Collection[int] | None, lasting: Collection[fx.Node]
) -> int:
    """The most bytes that live at once, beyond what is read and what is returned.

    fleeting: given for compiled code, which lets go of what was kept for it as soon as it has read it, mostly
    before it makes the last of its results, so that the two are never there together.
    """
    results = {memory_of(write.node) for write in section.writes}
    kept = _kept(section, lasting) - results if fleeting is not None else set()
    outside = {memory_of(node) for node in section.read_nodes} - kept | set(fleeting or ())
    if fleeting is None:
        outside |= results
    reused = {} if fleeting is None else _reused(section)
    bytes_of: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, node in enumerate(section.body):
        for made, tensor in _storages([node, *node.all_input_nodes]):
            storage = reused.get(made, made)
            if storage not in outside:
                bytes_of[storage] = max(sizes.storage_bytes(tensor), bytes_of.get(storage, 0))
                first.setdefault(storage, 0 if storage in kept else position)
                last[storage] = len(section.body) - 1 if storage in results else position
    boundary = sum(nbytes for storage, nbytes in bytes_of.items() if storage in kept or storage in results)
    return peak(len(section.body), bytes_of, first, last) - boundary


def _kept(section: Section, lasting: Collection[fx.Node]) -> set[int]:
    """The memory of what other phases keep for this one alone."""
    given = [*section.reads.get("saved", {}).values(), *section.reads.get("carried", {}).values()]
    return {memory_of(node) for node in given} - {memory_of(node) for node in lasting}


def _reused(section: Section) -> dict[int, int]:
    """Where compiled code writes in place: the memory of each such result is that of what it began from."""
    body, found = set(section.body), dict[int, int]()
    for node in section.body:
        if node.target in _WRITES_INTO:
            start = node.all_input_nodes[0]
            if start in body and len(start.users) == 1:
                found[memory_of(node)] = found.get(memory_of(start), memory_of(start))
    return found


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
