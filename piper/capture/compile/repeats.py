"""Finds the repeated layers of a phase's graph, so that each distinct layer is compiled once.

The pieces of a graph run one after the other and together are the graph. A cut lies behind a product where it
can: products are kernels of their own, so that no fusion is lost there.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx

from piper.capture.compile.hashing import digest_of, node_lines
from piper.capture.compile.operators import mm_into
from piper.capture.trace.graph_walks import RepeatedRun, interval_sums, repeated_runs

FEWEST = 3  # layers that are equal
SMALLEST = 8  # operations of a layer
WORTH = 200  # operations that need not be compiled again, for which a phase is cut
PERIODS = 16  # lengths of a layer that are tried
PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "aten::convolution",
        "piper::mm_into",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)  # operations that Inductor does not fuse with what follows


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePiece:
    """A run of a graph's operations as a module of its own."""

    module: fx.GraphModule
    arguments: tuple[Tensor, ...]  # fakes
    reads: tuple[fx.Node, ...]  # of the whole graph, in the order of the arguments
    writes: tuple[fx.Node, ...]  # in the order of its results
    key: str  # equal for pieces that do the same


def pieces_of(module: fx.GraphModule) -> list[PhasePiece]:
    """Return the pieces of a graph, whose nodes have their values; none where cutting it is not worth it."""
    body = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if len(body) < WORTH or not all(map(plain, body)) or not all(map(fixed, module.graph.nodes)):
        return []
    cuts = sorted({0, len(body), *cuts_of(body, [label_of(node) for node in body])})
    runs = [body[start:stop] for start, stop in pairwise(cuts)]
    known: dict[str, fx.GraphModule] = {}
    pieces = [piece_of(module, run, known) for run in runs]
    distinct = {piece.key: len(run) for piece, run in zip(pieces, runs, strict=True)}
    return pieces if len(body) - sum(distinct.values()) >= WORTH else []


def plain(node: fx.Node) -> bool:
    """Return whether an operation can move into a module of its own: a call that changes no value.

    A product that is written into given memory is read by nothing else.
    """
    if node.op != "call_function":
        return False
    if node.target is mm_into:
        return not node.users
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def fixed(node: fx.Node) -> bool:
    """Return whether all sizes of a value are known."""
    value = node.meta.get("val")
    sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def label_of(node: fx.Node) -> str:
    """Return what an operation does, wherever it stands: its target, its literal arguments and its result."""
    literals = fx.node.map_arg((node.args, node.kwargs), lambda argument: "%")
    return f"{node.target} {literals} {described(node.meta.get('val'))}"


def described(value: object) -> str:
    """Return the type and layout of a value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    if isinstance(value, tuple | list):
        return " ".join(map(described, value))
    return repr(value)


def cuts_of(body: Sequence[fx.Node], labels: Sequence[str], offset: int = 0) -> Iterator[int]:
    """Yield the places between layers, of the longest run of equal layers and then of what lies around it."""
    run = longest_run(labels)
    if run is None:
        return
    start, stop, period = run.start, run.stop, run.period
    nbytes, others = crossing(body)

    def cost(place: int) -> tuple[bool, bool, bool, int]:
        """Return what a cut costs: it is impossible, loses layers or fusions, and the bytes that cross it."""
        lost = (stop - start) // period - (stop - place) // period
        inside = place + period  # a place with layers on both sides
        fused = not ends_kernel(body[inside - 1])
        return others[inside] > 0, lost > 1, fused, nbytes[inside]

    first = min(range(start, start + period), key=cost)
    places = list(range(first, stop + 1, period))
    yield from (offset + place for place in places)
    yield from cuts_of(body[: places[0]], labels[: places[0]], offset)
    yield from cuts_of(body[places[-1] :], labels[places[-1] :], offset + places[-1])


def longest_run(labels: Sequence[str]) -> RepeatedRun | None:
    """Return the longest run of labels; of nearly equal ones that of the shortest period."""
    best: RepeatedRun | None = None
    for run in repeated_runs(labels, likely_periods(labels)):
        if run.times >= FEWEST and (best is None or run.length > best.length + run.period):
            best = run
    return best


def likely_periods(labels: Sequence[str]) -> list[int]:
    """Return the most common distances between equal operations, the shortest first."""
    last: dict[str, int] = {}
    distances: Counter[int] = Counter()
    for place, label in enumerate(labels):
        if label in last:
            distances[place - last[label]] += 1
        last[label] = place
    common = distances.most_common()
    return sorted([period for period, _ in common if period >= SMALLEST][:PERIODS])


def crossing(body: Sequence[fx.Node]) -> tuple[list[int], list[int]]:
    """Return what goes on past each place of a run of operations: bytes of tensors, values that are none."""
    places = {node: place for place, node in enumerate(body)}
    nbytes, others = [], []
    for node, place in places.items():
        last = max((places[user] for user in node.users if user in places), default=place)
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            nbytes.append((place + 1, last, value.nbytes))
        else:
            others.append((place + 1, last, 1))
    return interval_sums(len(body), nbytes), interval_sums(len(body), others)


def ends_kernel(node: fx.Node) -> bool:
    """Return whether an operation, or the one whose result it takes, is a kernel of its own."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return is_product(node)


def is_product(node: fx.Node) -> bool:
    """Return whether an operation is a kernel of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name().partition(".")[0] in PRODUCTS


def piece_of(module: fx.GraphModule, run: Sequence[fx.Node], known: dict[str, fx.GraphModule]) -> PhasePiece:
    """Return a run of operations as a module of its own, or as an equal one that is known already."""
    inside = set(run)
    reads = list(dict.fromkeys(read for node in run for read in node.all_input_nodes if read not in inside))
    writes = [node for node in run if any(user not in inside for user in node.users)]
    arguments = tuple(node.meta["val"] for node in reads)
    numbers = {node: number for number, node in enumerate(reads)}
    lines = [*map(described, arguments), *node_lines(run, module, numbers)]
    key = digest_of([*lines, " ".join(str(numbers[node]) for node in writes)])
    if key not in known:
        known[key] = module_of(module, run, reads, writes)
    return PhasePiece(
        module=known[key], arguments=arguments, reads=tuple(reads), writes=tuple(writes), key=key
    )


def module_of(
    module: fx.GraphModule, run: Sequence[fx.Node], reads: Sequence[fx.Node], writes: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a run of operations as a module."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"read_{n}") for n, node in enumerate(reads)}
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(tuple(copies[node] for node in writes))
    return fx.GraphModule(module, graph)
