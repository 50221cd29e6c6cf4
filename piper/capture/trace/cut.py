"""Cuts the captured graph into chunks: as few as the regions allow, without a cycle between chunks."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from piper.capture.trace.functionalize import Entangled, value
from piper.capture.trace.graph_walks import ready_first
from piper.capture.trace.markers import how_of, marker
from piper.capture.trace.recording import Recording
from piper.capture.trace.regions import Regions
from piper.capture.trace_errors import node_line
from piper.errors import CaptureError
from piper.ir.chunk import ChunkKind, Tags, region_name


@dataclass(slots=True)
class GrowingChunk:
    """The nodes of one chunk, while it grows."""

    tags: Tags
    kind: ChunkKind
    number: int
    nodes: list[fx.Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)  # groups whose results this one reads
    behind: int = 0  # bit i: this group runs after group i, directly or not; its own bit too


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One chunk: a name, a region and the nodes that run in it."""

    name: str
    tags: Tags
    kind: ChunkKind
    nodes: tuple[fx.Node, ...]


def cut(recording: Recording, regions: Regions, entangled: Sequence[Entangled]) -> list[Cut]:
    """Cut the graph; the chunks come in an order in which they can run."""
    groups = _Groups()
    placed: dict[fx.Node, GrowingChunk] = {}
    bundles: dict[int, GrowingChunk] = {}
    route_of: dict[fx.Node, GrowingChunk] = {}
    for node in sorted(regions.region_of, key=regions.order.__getitem__):
        sources = {placed[source].number for source in node.all_input_nodes if source in placed}
        holder = node.args[0] if node.target is operator.getitem else None
        several = isinstance(holder, fx.Node) and isinstance(value(holder), tuple | list)
        if isinstance(holder, fx.Node) and holder in placed and several:
            group = placed[holder]  # chunks exchange tensors: the parts of a tuple stay with it
        elif kind := marker(node):
            group = groups.new(regions.region_of[node], kind)
        elif route := regions.areas.get(node):
            if route not in route_of:
                route_of[route] = groups.new(regions.region_of[route], "expert")
            group = route_of[route]
        elif bundle := recording.bundles.get(node):
            if bundle not in bundles:
                bundles[bundle] = groups.new(regions.region_of[node], "compute")
            group = bundles[bundle]
        else:
            group = groups.fitting(regions.region_of[node], sources)
        groups.add(group, node, sources)
        placed[node] = group
    _check_entangled(entangled, placed)
    return _named(groups.sorted(regions.order))


class _Groups:
    """Groups of nodes, and which run after which."""

    def __init__(self) -> None:
        self.all: list[GrowingChunk] = []
        self.by_tags: dict[Tags, list[GrowingChunk]] = {}

    def new(self, tags: Tags, kind: ChunkKind) -> GrowingChunk:
        group = GrowingChunk(tags, kind, len(self.all), behind=1 << len(self.all))
        self.all.append(group)
        if kind == "compute":
            self.by_tags.setdefault(tags, []).append(group)
        return group

    def fitting(self, tags: Tags, sources: set[int]) -> GrowingChunk:
        """Return the latest group of a region that a reader of `sources` can join, or a new one.

        A group can be joined where that makes no cycle between groups.
        """
        for group in reversed(self.by_tags.get(tags, [])):
            others = sources - {group.number}
            if not any(self.all[other].behind >> group.number & 1 for other in others):
                return group
        return self.new(tags, "compute")

    def add(self, group: GrowingChunk, node: fx.Node, sources: set[int]) -> None:
        group.nodes.append(node)
        fresh = sources - {group.number} - group.sources
        group.sources |= fresh
        behind = group.behind
        for source in fresh:
            behind |= self.all[source].behind
        if behind != group.behind:
            for other in self.all:
                if other.behind >> group.number & 1:
                    other.behind |= behind

    def sorted(self, order: Mapping[fx.Node, int]) -> list[GrowingChunk]:
        """Return the groups in topological order. Groups that could run at once keep program order."""
        by_place = sorted(self.all, key=lambda group: order[group.nodes[0]])
        numbers = ready_first({group.number: group.sources for group in by_place})
        assert len(numbers) == len(self.all), "chunks wait for each other"
        return [self.all[number] for number in numbers]


def _named(groups: list[GrowingChunk]) -> list[Cut]:
    """Name each chunk by its region: `PP=0`, its second piece `PP=0 #1`, a marker `PP=0 EP=0 route`.

    A collective is a region of its own, counted along its axis: `PP=0 TP=3`.
    """
    taken: dict[str, int] = {}
    collectives: dict[str, int] = {}
    cuts = []
    for group in groups:
        if group.kind == "collective":
            axis = how_of(group.nodes[0]).axis
            collectives[axis] = collectives.get(axis, -1) + 1
            group.tags = (*group.tags, (axis, collectives[axis]))
        name = region_name(group.tags)
        if group.kind in ("route", "unroute"):
            name += f" {group.kind}"
        piece = taken.get(name, 0)
        taken[name] = piece + 1
        full = f"{name} #{piece}" if piece else name
        cuts.append(Cut(name=full, tags=group.tags, kind=group.kind, nodes=tuple(group.nodes)))
    return cuts


def _check_entangled(entangled: Sequence[Entangled], placed: Mapping[fx.Node, GrowingChunk]) -> None:
    for group in entangled:
        region_of = {placed[node].number for node in group.nodes if node in placed}
        if len(region_of) > 1:
            raise CaptureError(
                "a tensor is changed in place while another region sees it under another name",
                by=f"{group.write.name}{node_line(group.write)}",
                hint="write x = x + y instead of x += y there, or clone the view first",
            )
