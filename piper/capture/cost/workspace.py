"""Which nodes of a joint graph a phase runs, and the memory that lives only while it does."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from piper.capture.cost.aliases import (
    cheap,
    is_view,
    memories,
    memory_of,
    recomputable,
    storages,
    tensors_in,
)
from piper.capture.trace.graph_walks import interval_sums
from piper.capture.trace.sizes import SymbolicSizes

Kind = Literal["inputs", "params", "buffers", "saved", "carried", "tangents"]
KINDS: tuple[Kind, ...] = ("inputs", "params", "buffers", "saved", "carried", "tangents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A result of a phase. `copy`: it must not share memory with the values it is computed from."""

    node: fx.Node
    copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a joint graph that one phase runs. Positions are those of the piece."""

    reads: Mapping[Kind, Mapping[int, fx.Node]]
    body: Sequence[fx.Node]
    lengths: Mapping[fx.Node, tuple[fx.Node, int]]  # a size, as an axis of something the phase reads
    writes: Sequence[Write]
    writers: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    # ^ recomputed values, each with the result in whose kernel a compiler writes it
    grad_inputs: tuple[int, ...] = ()
    grad_params: tuple[int, ...] = ()

    @property
    def read_nodes(self) -> list[fx.Node]:
        return [node for kind in KINDS for node in self.reads[kind].values()]


_aten = torch.ops.aten
_WRITES_INTO = (
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten._unsafe_masked_index_put_accumulate.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter_add.default,
)


def workspace_of(
    section: Section,
    sizes: SymbolicSizes,
    fleeting: Collection[int] | None,
    lasting: Collection[fx.Node],
    given: Collection[fx.Node] = (),
) -> int:
    """Return the peak memory of a phase in bytes, beyond its arguments and its results.

    It can be negative for compiled code, which frees a saved value after its last read. Most saved values are
    freed before the last results are allocated, so the two are never in memory together.

    fleeting: the storages that compiled code never allocates. None: the phase is not compiled.
    given: results whose memory is there from the start.
    """
    results = {memory_of(write.node) for write in section.writes}
    kept, reused, together = set[int](), dict[int, int](), dict[int, int]()
    outside = {memory_of(node) for node in section.read_nodes}
    if fleeting is None:
        outside |= results
    else:
        saved = [*section.reads["saved"].values(), *section.reads["carried"].values()]
        # What other phases save for this phase alone
        kept = {memory_of(node) for node in saved} - {memory_of(node) for node in lasting} - results
        outside = outside - kept | set(fleeting)
        reused, together = _reused(section), _together(section.body, sizes, set(fleeting))
    early = kept | {memory_of(node) for node in given}
    until = _until(section.body, set(fleeting or ()))
    bytes_of, first, last = dict[int, int](), dict[int, int](), dict[int, int]()
    for position, node in enumerate(section.body):
        for memory, tensor in storages([node, *node.all_input_nodes]):
            storage = reused.get(memory, memory)
            if storage not in outside:
                bytes_of[storage] = max(sizes.storage_bytes(tensor), bytes_of.get(storage, 0))
                first.setdefault(storage, 0 if storage in early else position)
                last[storage] = max(until[node], together.get(memory, 0), last.get(storage, 0))
                if storage in results:
                    last[storage] = len(section.body) - 1
    boundary = sum(nbytes for storage, nbytes in bytes_of.items() if storage in kept or storage in results)
    inside = ((i, i, nbytes) for i, node in enumerate(section.body) if (nbytes := _inside(node, sizes)))
    spans = ((first[s], last[s], nbytes) for s, nbytes in bytes_of.items())
    return max(interval_sums(len(section.body), itertools.chain(spans, inside))) - boundary


def _inside(node: fx.Node, sizes: SymbolicSizes) -> int:
    """Return the bytes that an operation holds only while it runs: a piece of the logits of a fused loss."""
    start = {"piper.head_sums.default": 0, "piper.head_sums_grad.default": 1}.get(str(node.target))
    if start is None:
        return 0
    hidden, weight, pieces = (node.args[start + place] for place in (0, 1, 6 if start else 5))
    assert isinstance(hidden, fx.Node) and isinstance(weight, fx.Node) and isinstance(pieces, int)
    rows, width = sizes.shape(hidden.meta["val"])
    kind = hidden.meta["val"].dtype
    wide = torch.promote_types(kind, torch.float32)
    each = wide.itemsize + (kind.itemsize if kind is not wide else 0)  # logits in both types
    logits = rows * -(-sizes.shape(weight.meta["val"])[0] // pieces)
    return each * (logits + rows * width * start)  # and the sum of the gradients of the rows


def _until(body: Sequence[fx.Node], fleeting: Set[int]) -> dict[fx.Node, int]:
    """Return the position in the body after which each operation has read its arguments."""
    # An operation whose result has no memory is fused into its readers, and reads its arguments there.
    last_reads: dict[fx.Node, int] = {}
    for position in reversed(range(len(body))):
        node = body[position]
        readers = [last_reads[user] for user in node.users if user in last_reads]
        is_fused = bool(tensors_in(node)) and fleeting >= set(memories(node))
        last_reads[node] = max(readers, default=position) if is_fused else position
    return last_reads


def _together(body: Sequence[fx.Node], sizes: SymbolicSizes, fleeting: Set[int]) -> dict[int, int]:
    """Return, by storage, the position of the last result of a kernel that makes several."""
    # Compiled code fuses results of one size that read the same memory into one kernel, unless one of them
    # depends on the other through an operation that cannot be fused. Readers of the first wait for the last.
    place = {node: position for position, node in enumerate(body)}
    readers = _fused_readers(body, fleeting)
    results = dict.fromkeys(node for nodes in readers.values() for node in nodes)
    apart = _apart(body, results)
    length = {node: math.prod(sizes.shape(tensors_in(node)[0])) for node in results}
    last_results: dict[int, int] = {}
    for nodes in readers.values():
        for first, later in itertools.combinations(nodes, 2):
            if length[first] == length[later] and not apart(first, later):
                last_results[memory_of(first)] = max(place[later], last_results.get(memory_of(first), 0))
    return last_results


def _fused_readers(body: Sequence[fx.Node], fleeting: Set[int]) -> dict[int, list[fx.Node]]:
    """Return, for each storage, the fusible operations that read it directly or through fused operations."""
    sources: dict[fx.Node, set[int]] = {}  # the storages that a value without its own is computed from
    readers: dict[int, list[fx.Node]] = {}
    for node in body:
        read: set[int] = set()
        for source in node.all_input_nodes:
            own = set(memories(source))
            read |= own if own and own.isdisjoint(fleeting) else sources.get(source, set())
        if fleeting >= set(memories(node)) or is_view(node):
            sources[node] = read
        elif cheap(node):
            for memory in read:
                readers.setdefault(memory, []).append(node)
    return readers


def _apart(body: Sequence[fx.Node], results: Collection[fx.Node]) -> Callable[[fx.Node, fx.Node], bool]:
    """Return a function that says whether an operation that cannot be fused lies between two results."""
    bit = {node: 1 << number for number, node in enumerate(results)}
    reached: dict[fx.Node, int] = {}
    behind: dict[fx.Node, int] = {}
    for node in body:
        inner = [source for source in node.all_input_nodes if source in reached]
        reached[node] = functools.reduce(operator.or_, (reached[source] for source in inner), 0)
        behind[node] = functools.reduce(operator.or_, (behind[source] for source in inner), 0)
        if not cheap(node) and not recomputable(node):
            behind[node] = reached[node]
        reached[node] |= bit.get(node, 0)
    return lambda first, later: bool(behind[later] & bit[first])


def _reused(section: Section) -> dict[int, int]:
    """Return, for results that compiled code writes in place, the storage that each one reuses."""
    body, reused = set(section.body), dict[int, int]()
    for node in section.body:
        if node.target in _WRITES_INTO:
            start = node.all_input_nodes[0]
            if start in body and len(start.users) == 1:
                reused[memory_of(node)] = reused.get(memory_of(start), memory_of(start))
    return reused
