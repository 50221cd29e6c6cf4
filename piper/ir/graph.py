"""The training graph that directives rewrite: which nodes run, and on which devices.

Replicas are not expanded: a node carries its whole set of devices, so the graph does not grow with the degree
of data parallelism. Data edges are not stored but derived from the chunks, so no rewrite can leave one stale.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from piper.ir.chunk import CapturedModel, Chunk, Output, Phase, Tags
from piper.ir.devices import Devices
from piper.ir.mesh import EXPERTS, Axis, Mesh, mesh_of
from piper.ir.node import Compute, compute_name
from piper.ir.protection import Protection
from piper.ir.select import At
from piper.ir.sharding import AxisPlacement

SELECTED: Mapping[Phase | None, tuple[Phase, ...]] = {
    None: ("F", "B", "BI", "BW"),
    "F": ("F",),
    "B": ("B", "BI", "BW"),  # a backward in halves is still that backward
    "BI": ("BI",),
    "BW": ("BW",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPolicy:
    """An axis along which a chunk is sharded."""

    axis: str
    degree: int
    stream: str  # of its collectives
    origin: int  # the directive that said so
    samples: bool = False  # it shards fields of the batch, such as the sequence
    between: bool = False  # it shards what travels between regions, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a chunk's parameters live on its devices."""

    zero: int = 0  # 1: optimizer state is sharded, 2: gradients too, 3: parameters too
    bucket_mb: float | None = None
    reduce: str = "fp32"  # the type gradients travel in between replicas: "fp32" or "bf16"
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    ways: int = 1  # the degree of the axis along which experts are sharded
    by_expert: Mapping[str, AxisPlacement] = field(default_factory=dict)  # of parameters and buffers
    exchange_stream: str = "exchange"
    axes: tuple[AxisPolicy, ...] = ()  # the innermost groups first
    origin: int | None = None  # the directive that said so

    @property
    def degree(self) -> int:
        """Return the number of devices that share the same samples."""
        return math.prod(held.degree for held in self.axes) if self.axes else 1

    def mesh(self, devices: Devices) -> Mesh:
        """Return how a chunk's devices are arranged: along its axes, then by expert, then by sample."""
        axes = [Axis(name=held.axis, degree=held.degree) for held in self.axes]
        if self.ways > 1:
            axes.append(Axis(name=EXPERTS, degree=self.ways, samples=True))
        return mesh_of(devices, axes)

    def placements(self, name: str) -> tuple[AxisPlacement, ...]:
        """Return how a parameter or a buffer is sharded by expert. Empty: it is not."""
        return (self.by_expert[name],) if name in self.by_expert else ()


NO_POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """One chunk on one microbatch: the node of each of its phases, and its saved values."""

    chunk: str
    part: Tags
    tags: Mapping[str, int]  # the chunk's tags and the part's, together


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member of an ordered group, named by its content, so that later rewrites can find its successors."""

    chunk: str
    phase: Phase
    part: Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """Groups that one `order` directive puts in sequence."""

    by: int  # the directive's number
    groups: tuple[tuple[GroupMember, ...], ...]


class Index:
    """Finds cells by tag in time proportional to what is found."""

    def __init__(self, cells: Iterable[ChunkRun]) -> None:
        self.cells = tuple(cells)
        self.indices: dict[str, set[int]] = {}  # of each tag
        for cell in self.cells:
            for tag, index in cell.tags.items():
                self.indices.setdefault(tag, set()).add(index)
        self.tags = set(self.indices)
        self._tables: dict[tuple[str, ...], dict[tuple[int | None, ...], list[ChunkRun]]] = {}

    def find(self, at: At) -> list[ChunkRun]:
        """Return the cells whose tags match `at`."""
        exact = tuple(tag for tag, index in at.tags if isinstance(index, int))
        if exact not in self._tables:
            table = self._tables[exact] = {}
            for cell in self.cells:
                table.setdefault(tuple(map(cell.tags.get, exact)), []).append(cell)
        found = self._tables[exact].get(tuple(index for _, index in at.tags if isinstance(index, int)), [])
        loose = [(tag, index == "*") for tag, index in at.tags if index is None or index == "*"]
        several = [(tag, frozenset(index)) for tag, index in at.tags if isinstance(index, tuple)]
        if several:
            found = [cell for cell in found if all(cell.tags.get(tag) in wanted for tag, wanted in several)]
        if not loose:
            return found
        return [cell for cell in found if all((tag in cell.tags) == present for tag, present in loose)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedDirective:
    """A directive that was applied, as messages name it."""

    verb: str
    title: str  # "place #0 (llama.py:41)"
    places: bool = True  # it says on which devices nodes run

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedChunk:
    """On which stream a chunk's state is copied, and the directive that says so."""

    stream: str
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedChunk:
    """How what a chunk saves is kept in memory of the host, and the directive that says so."""

    stream: str
    least: int  # bytes: smaller values stay
    ahead: int  # compute nodes that each copy may take
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Compute nodes, the policies of their chunks' parameters, and the orderings between them."""

    outline: CapturedModel
    nodes: Mapping[str, Compute]
    index: Index
    parts: Mapping[str, Tags] = field(default_factory=dict)  # chunk -> (("MB", 8),): its axes and their sizes
    policies: Mapping[str, Policy] = field(default_factory=dict)
    part_policies: Mapping[str, Mapping[Tags, Policy]] = field(default_factory=dict)
    # ^ chunk -> the policies that directives asked for on some of its microbatches
    transfer_streams: Mapping[str, str] = field(default_factory=dict)  # chunk -> the stream its transfers use
    budgets: Mapping[str, float] = field(default_factory=dict)  # chunk -> its share of saved activations
    reruns: Mapping[str, str] = field(default_factory=dict)  # chunk -> its region that is recomputed
    precisions: Mapping[str, str] = field(default_factory=dict)  # chunk -> the precision of its products
    gathered_in_fp8: frozenset[str] = frozenset()  # chunks whose weights are, where they are sharded
    protected: Mapping[str, ProtectedChunk] = field(default_factory=dict)  # by chunk
    protection: Protection | None = None  # the same for all of them
    offloaded: Mapping[tuple[str, str], OffloadedChunk] = field(default_factory=dict)
    # ^ by what is offloaded ("activations") and by chunk
    orderings: tuple[Ordering, ...] = ()
    directives: tuple[AppliedDirective, ...] = ()  # by number

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Return the chunks by name, in topological order."""
        return {chunk.name: chunk for chunk in self.outline.chunks}

    def policy(self, chunk: str) -> Policy:
        """Return how a chunk's parameters live: the default where no directive set it."""
        return self.policies.get(chunk, NO_POLICY)

    def mesh(self, node: Compute) -> Mesh:
        """Return how the devices of a node are arranged."""
        return self.policy(node.chunk).mesh(node.devices)

    def with_policies(self, nodes: Iterable[Compute], change: Callable[[str, Policy], Policy]) -> "Graph":
        """Return the graph with the policies of nodes changed: of their chunks, or of microbatches alone.

        change: takes a chunk and its policy so far.
        """
        policies, apart = dict(self.policies), dict(self.part_policies)
        selected: dict[str, dict[Tags, None]] = {}
        for node in nodes:
            selected.setdefault(node.chunk, {})[node.part] = None
        for chunk, parts in selected.items():
            held, found = self.policy(chunk), dict(apart.get(chunk, {}))
            if len(parts) == math.prod(size for _, size in self.parts[chunk]):
                policies[chunk] = change(chunk, held)
                found = {part: change(chunk, policy) for part, policy in found.items()}
            else:
                found |= {part: change(chunk, found.get(part, held)) for part in parts}
            if found:
                apart[chunk] = found
        return replace(self, policies=policies, part_policies=apart)

    def select(self, at: At) -> list[Compute]:
        """Return the nodes that `at` selects. PASS="B" also selects both halves of a split backward."""
        found = []
        phases = SELECTED[at.phase]
        for cell in self.index.find(at):
            for phase in phases:
                node = self.nodes.get(compute_name(cell.chunk, phase, cell.part))
                if node is not None:
                    found.append(node)
        return found

    def update(self, nodes: Iterable[Compute]) -> "Graph":
        """Return the graph with some nodes replaced by others of the same name."""
        return replace(self, nodes={**self.nodes, **{node.name: node for node in nodes}})

    def splice(self, successors: Mapping[str, tuple[Compute, ...]]) -> "Graph":
        """Return the graph with each named node replaced, in its place, by its successors."""
        nodes: dict[str, Compute] = {}
        for name, node in self.nodes.items():
            for successor in successors.get(name, (node,)):
                nodes[successor.name] = successor
        return replace(self, nodes=nodes)

    def link(self, ordering: Ordering) -> "Graph":
        """Return the graph with one more ordering."""
        return replace(self, orderings=(*self.orderings, ordering))

    def drop(self, names: Iterable[str]) -> "Graph":
        """Return the graph without some nodes."""
        gone = set(names)
        return replace(self, nodes={name: node for name, node in self.nodes.items() if name not in gone})

    def devices(self) -> Devices:
        """Return every device that some node is placed on."""
        sets = {node.devices for node in self.nodes.values()}
        return tuple(sorted({device for devices in sets for device in devices}))

    def placed_by(self, node: Compute) -> str:
        """Return the title of the directive that placed a node, for errors about its placement."""
        for number in reversed(node.origin):
            if self.directives[number].places:
                return self.directives[number].title
        return "strategy"


def start(outline: CapturedModel) -> Graph:
    """Return the graph of one step on one device: a forward per chunk, and a backward where there is one."""
    nodes: dict[str, Compute] = {}
    for chunk in outline.chunks:
        node = Compute(chunk=chunk.name, phase="F")
        nodes[node.name] = node
    for chunk in reversed(outline.chunks):
        if has_backward(chunk):
            node = Compute(chunk=chunk.name, phase="B")
            nodes[node.name] = node
    index = Index(ChunkRun(chunk=c.name, part=(), tags=dict(c.tags)) for c in outline.chunks)
    return Graph(outline=outline, nodes=nodes, index=index, parts={c.name: () for c in outline.chunks})


def has_backward(chunk: Chunk) -> bool:
    """Return whether a chunk has anything to differentiate."""
    return not chunk.phases or "B" in chunk.phases


def inputs_from_chunks(chunk: Chunk) -> Iterator[tuple[int, Output]]:
    """Yield a chunk's inputs that other chunks produce, with their positions."""
    for position, source in enumerate(chunk.inputs):
        if isinstance(source, Output):
            yield position, source
