"""The training graph that directives rewrite: which nodes run, and on which devices.

Replicas are not expanded: a node carries its whole set of devices, so the graph does not grow with the degree
of data parallelism. Data edges are not stored but derived from the chunks, so no rewrite can leave one stale.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from piper.ir.averaging import Averaging
from piper.ir.chunk import CapturedModel, Chunk, Phase, Tags
from piper.ir.chunk_options import ChunkOptions, Policy, Protection
from piper.ir.devices import Devices
from piper.ir.ids import Pass
from piper.ir.mesh import Mesh
from piper.ir.node import Compute, compute_name
from piper.ir.select import At

Chosen = TypeVar("Chosen")

SELECTED: Mapping[Phase | None, tuple[Phase, ...]] = {
    None: ("F", "B", "BI", "BW"),
    "F": ("F",),
    "B": ("B", "BI", "BW"),  # a backward in halves is still that backward
    "BI": ("BI",),
    "BW": ("BW",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """One chunk on one microbatch: the node of each of its phases, and its saved values."""

    chunk: str
    part: Tags
    tags: Mapping[str, int]  # the chunk's tags and the part's, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """Groups of passes that one `order` directive puts in sequence. A later split may have divided them."""

    by: int  # the directive's number
    groups: tuple[tuple[Pass, ...], ...]


@lru_cache(maxsize=256)
def microbatches_of(axes: Tags) -> tuple[Tags, ...]:
    """Return every microbatch of some axes, in order: (("MB", 2),) gives MB=0 and MB=1."""
    return tuple(product(*([(axis, index) for index in range(size)] for axis, size in axes)))


class Index:
    """Finds cells by tag in time proportional to what is found."""

    def __init__(self, outline: CapturedModel, parts: Mapping[str, Tags]) -> None:
        self.cells = tuple(
            ChunkRun(chunk=chunk.name, part=part, tags=dict((*chunk.tags, *part)))
            for chunk in outline.chunks
            for part in microbatches_of(parts[chunk.name])
        )
        self.indices: dict[str, set[int]] = {}  # of each tag
        for cell in self.cells:
            for tag, index in cell.tags.items():
                self.indices.setdefault(tag, set()).add(index)
        self._tables: dict[tuple[str, ...], dict[tuple[int | None, ...], list[ChunkRun]]] = {}

    def find(self, at: At) -> list[ChunkRun]:
        """Return the cells whose tags match `at`."""
        exact = tuple(tag for tag, index in at.tags if isinstance(index, int))
        if exact not in self._tables:
            table = self._tables[exact] = {}
            for cell in self.cells:
                table.setdefault(tuple(map(cell.tags.get, exact)), []).append(cell)
        cells = self._tables[exact].get(tuple(index for _, index in at.tags if isinstance(index, int)), [])
        loose = [(tag, index == "*") for tag, index in at.tags if index is None or index == "*"]
        several = [(tag, frozenset(index)) for tag, index in at.tags if isinstance(index, tuple)]
        if several:
            cells = [cell for cell in cells if all(cell.tags.get(tag) in wanted for tag, wanted in several)]
        return [cell for cell in cells if all((tag in cell.tags) == present for tag, present in loose)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedDirective:
    """A directive that was applied, as messages name it."""

    verb: str
    title: str  # "place #0 (llama.py:41)"
    places: bool = True  # it says on which devices nodes run

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Compute nodes, the options of their chunks, and the orderings between them."""

    outline: CapturedModel
    nodes: Mapping[str, Compute]
    index: Index
    parts: Mapping[str, Tags] = field(default_factory=dict)  # chunk -> (("MB", 8),): its axes and their sizes
    options: Mapping[str, ChunkOptions] = field(default_factory=dict)  # by chunk
    orderings: tuple[Ordering, ...] = ()
    directives: tuple[AppliedDirective, ...] = ()  # by number
    averaging: Averaging | None = None  # the graph is then that of the first group
    metrics: tuple[str, ...] = ()  # that directives add to those of the loss: a sum of the step each

    @property
    def chunks(self) -> dict[str, Chunk]:
        """Return the chunks by name, in topological order."""
        return {chunk.name: chunk for chunk in self.outline.chunks}

    def microbatches(self, chunk: str) -> tuple[Tags, ...]:
        return microbatches_of(self.parts[chunk])

    def policy(self, chunk: str) -> Policy:
        """Return how a chunk's parameters live: the default where no directive set it."""
        return self.options[chunk].policy

    def chosen(self, option: Callable[[ChunkOptions], Chosen | None]) -> dict[str, Chosen]:
        """Return one option by chunk, for the chunks that have it."""
        values = ((chunk, option(options)) for chunk, options in self.options.items())
        return {chunk: value for chunk, value in values if value is not None}

    @property
    def protection(self) -> Protection | None:
        """Return how copies of the state are kept, if they are: the same for all chunks."""
        copies = self.chosen(lambda options: options.protect).values()
        return next((each.protection for each in copies), None)

    def with_options(
        self, chunks: Iterable[str], change: Callable[[str, ChunkOptions], ChunkOptions]
    ) -> "Graph":
        """Return the graph with the options of some chunks changed. change: takes a chunk and its options."""
        changed = {chunk: change(chunk, self.options[chunk]) for chunk in chunks}
        return replace(self, options={**self.options, **changed})

    def mesh(self, node: Compute) -> Mesh:
        """Return how the devices of a node are arranged."""
        return self.policy(node.chunk).mesh(node.devices)

    def with_policies(self, nodes: Iterable[Compute], change: Callable[[str, Policy], Policy]) -> "Graph":
        """Return the graph with the policies of nodes changed: of their chunks, or of microbatches alone."""
        selected: dict[str, dict[Tags, None]] = {}
        for node in nodes:
            selected.setdefault(node.chunk, {})[node.part] = None

        def changed(chunk: str, options: ChunkOptions) -> ChunkOptions:
            policy, known, parts = options.policy, options.part_policies, [*selected[chunk]]
            if len(parts) == len(self.microbatches(chunk)):
                policy, parts = change(chunk, policy), [*known]
            apart = {part: change(chunk, known.get(part, policy)) for part in parts}
            return replace(options, policy=policy, part_policies={**known, **apart})

        return self.with_options(selected, changed)

    def select(self, at: At) -> list[Compute]:
        """Return the nodes that `at` selects. PASS="B" also selects both halves of a split backward."""
        cells, phases = self.index.find(at), SELECTED[at.phase]
        names = (compute_name(cell.chunk, phase, cell.part) for cell in cells for phase in phases)
        return [self.nodes[name] for name in names if name in self.nodes]

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

    def devices(self) -> Devices:
        """Return every device that some node is placed on."""
        sets = {id(node.devices): node.devices for node in self.nodes.values()}.values()
        return tuple(sorted({device for devices in sets for device in devices}))

    def placed_by(self, node: Compute) -> str:
        """Return the title of the directive that placed a node, for errors about its placement."""
        for number in reversed(node.origin):
            if self.directives[number].places:
                return self.directives[number].title
        return "strategy"


def start(outline: CapturedModel) -> Graph:
    """Return the graph of one step on one device: a forward per chunk, and a backward where there is one."""
    nodes = [Compute(chunk=chunk.name, phase="F") for chunk in outline.chunks]
    nodes += [Compute(chunk=c.name, phase="B") for c in reversed(outline.chunks) if has_backward(c)]
    parts: dict[str, Tags] = {chunk.name: () for chunk in outline.chunks}
    return Graph(
        outline=outline,
        nodes={node.name: node for node in nodes},
        index=Index(outline, parts),
        parts=parts,
        options=dict.fromkeys(parts, ChunkOptions()),
    )


def has_backward(chunk: Chunk) -> bool:
    """Return whether a chunk has anything to differentiate."""
    return not chunk.phases or "B" in chunk.phases
