"""Finds the region of each node, and cuts the graph into as few chunks as that allows, without a cycle."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from piper.capture.trace.effects import draws
from piper.capture.trace.functionalize import Entangled, memory_of, value, written_memory
from piper.capture.trace.graph_walks import ready_first
from piper.capture.trace.recording import FromBuffer, FromParameter, Recording, how_of, live, marker
from piper.capture.trace_errors import node_line
from piper.errors import CaptureError
from piper.ir.chunk import AxisPosition, Batch, ChunkKind, Constant, Tags, region_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """The region in which every node runs."""

    order: Mapping[fx.Node, int]  # position in the program
    region_of: Mapping[fx.Node, Tags]  # of each node that runs in one place
    copied: frozenset[fx.Node]  # made from state alone: every chunk that needs one makes its own
    weights: frozenset[fx.Node]  # made from parameters alone: an expert region makes its own
    areas: Mapping[fx.Node, fx.Node]  # nodes after a `route` up to and with its `unroute`, and that `route`
    fixed: frozenset[fx.Node]  # the same for all samples


@dataclass(slots=True, eq=False)
class Cut:
    """One chunk: a name, a region and the nodes that run in it. It grows while the graph is cut."""

    tags: Tags
    kind: ChunkKind
    number: int
    nodes: list[fx.Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)  # cuts whose results this one reads
    behind: int = 0  # bit i: this one runs after cut i, directly or not; its own bit too
    name: str = ""


def cut(recording: Recording, regions: Regions, entangled: Sequence[Entangled]) -> list[Cut]:
    """Cut the graph; the chunks come in an order in which they can run."""
    groups = _Groups()
    placed: dict[fx.Node, Cut] = {}
    together: dict[int | fx.Node, Cut] = {}  # of each bundle, and of what lies behind each route
    for node in sorted(regions.region_of, key=regions.order.__getitem__):
        sources = {placed[source].number for source in node.all_input_nodes if source in placed}
        holder = node.args[0] if node.target is operator.getitem else None
        several = isinstance(holder, fx.Node) and isinstance(value(holder), tuple | list)
        if isinstance(holder, fx.Node) and holder in placed and several:
            group = placed[holder]  # chunks exchange tensors: the parts of a tuple stay with it
        elif kind := marker(node):
            group = groups.new(regions.region_of[node], kind)
        elif whole := regions.areas.get(node) or recording.bundles.get(node):
            if whole not in together:
                routed = isinstance(whole, fx.Node)
                region = regions.region_of[whole if isinstance(whole, fx.Node) else node]
                together[whole] = groups.new(region, "expert" if routed else "compute")
            group = together[whole]
        else:
            group = groups.fitting(regions.region_of[node], sources)
        groups.add(group, node, sources)
        placed[node] = group
    for tangle in entangled:
        if len({placed[node].number for node in tangle.nodes if node in placed}) > 1:
            raise CaptureError(
                "a tensor is changed in place while another region sees it under another name",
                by=f"{tangle.write.name}{node_line(tangle.write)}",
                hint="write x = x + y instead of x += y there, or clone the view first",
            )
    cuts = groups.sorted(regions.order)
    _name(cuts)
    return cuts


class _Groups:
    """Groups of nodes, and which run after which."""

    def __init__(self) -> None:
        self.all: list[Cut] = []
        self.by_tags: dict[Tags, list[Cut]] = {}

    def new(self, tags: Tags, kind: ChunkKind) -> Cut:
        group = Cut(tags, kind, len(self.all), behind=1 << len(self.all))
        self.all.append(group)
        if kind == "compute":
            self.by_tags.setdefault(tags, []).append(group)
        return group

    def fitting(self, tags: Tags, sources: set[int]) -> Cut:
        """Return the latest group that a reader of `sources` can join without a cycle, or a new one."""
        for group in reversed(self.by_tags.get(tags, [])):
            others = sources - {group.number}
            if not any(self.all[other].behind >> group.number & 1 for other in others):
                return group
        return self.new(tags, "compute")

    def add(self, group: Cut, node: fx.Node, sources: set[int]) -> None:
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

    def sorted(self, order: Mapping[fx.Node, int]) -> list[Cut]:
        """Return the groups in topological order. Groups that could run at once keep program order."""
        by_place = sorted(self.all, key=lambda group: order[group.nodes[0]])
        numbers = ready_first({group.number: group.sources for group in by_place})
        assert len(numbers) == len(self.all), "chunks wait for each other"
        return [self.all[number] for number in numbers]


def _name(cuts: Sequence[Cut]) -> None:
    """Name chunks: `PP=0`, a second piece `PP=0 #1`, a marker `PP=0 EP=0 route`, a collective `PP=0 TP=3`."""
    taken: dict[str, int] = {}
    collectives: dict[str, int] = {}
    for group in cuts:
        if group.kind == "collective":
            axis = how_of(group.nodes[0]).axis
            collectives[axis] = collectives.get(axis, -1) + 1
            group.tags = (*group.tags, (axis, collectives[axis]))
        name = region_name(group.tags)
        if group.kind in ("route", "unroute"):
            name += f" {group.kind}"
        piece = taken.get(name, 0)
        taken[name] = piece + 1
        group.name = f"{name} #{piece}" if piece else name


def find_regions(recording: Recording, entangled: Sequence[Entangled]) -> Regions:
    """Sort the nodes into regions."""
    graph = recording.graph
    needed = _needed(recording)
    nodes = [node for node in graph.nodes if node.op != "placeholder" and node in needed]
    order = {node: position for position, node in enumerate(nodes)}
    tied = frozenset(node for group in entangled for node in group.nodes)

    def anywhere(node: fx.Node) -> bool:
        """Return whether a node may run on every device, with the same result."""
        known = isinstance(value(node), Tensor | tuple | list) or node.op == "get_attr"
        return known and marker(node) is None and node not in recording.bundles and node not in tied

    def untrained(node: fx.Node) -> bool:
        result = value(node)
        return anywhere(node) and not (isinstance(result, Tensor) and result.requires_grad)

    fixed = (FromBuffer, Constant, AxisPosition)
    copied = _derived(recording, nodes, fixed, untrained)
    weights = _derived(recording, nodes, (*fixed, FromParameter), anywhere) - copied
    areas = _expert_areas(recording, nodes, copied | weights)
    sunk: set[fx.Node] = set()  # made from parameters that only expert regions use: they move into those
    for node in reversed(nodes):
        if node in weights and node.users and all(user in areas or user in sunk for user in node.users):
            sunk.add(node)
    routed = {source for node in nodes if marker(node) for source in node.all_input_nodes}
    # A marker has no code, so it cannot run its own copy of what it reads.
    placed = [node for node in nodes if node in routed or (node not in copied and node not in sunk)]
    region_of = _region_of(recording, placed)
    crossing = _crossing(recording, nodes, weights - routed, region_of)
    return Regions(
        order=order,
        region_of={node: region for node, region in region_of.items() if node not in crossing},
        copied=copied | crossing,
        weights=weights,
        areas=areas,
        fixed=_derived(recording, nodes, (*fixed, FromParameter), lambda node: True),
    )


def _needed(recording: Recording) -> set[fx.Node]:
    """Return the nodes that run: what the results depend on, whole bundles, and what those read."""
    wanted, needed = set(recording.results), set[fx.Node]()
    while not wanted <= needed:
        needed = live(recording.graph, wanted)
        bundles = {recording.bundles[node] for node in needed if node in recording.bundles}
        wanted |= {node for node, bundle in recording.bundles.items() if bundle in bundles}
    return needed


def _crossing(
    recording: Recording, nodes: list[fx.Node], weights: frozenset[fx.Node], region_of: Mapping[fx.Node, Tags]
) -> frozenset[fx.Node]:
    """Return the nodes made from parameters alone that another region than their own reads."""
    # Every region that reads one makes its own copy from the parameters, which are then tied: a value without
    # samples has no slices, so it could not travel between sets of devices of different sizes.
    readers: dict[fx.Node, set[Tags]] = {}
    for node in reversed(nodes):
        if node in weights:
            own = ({region_of[user]} for user in node.users if user in region_of and user not in readers)
            readers[node] = set().union(*own, *(readers.get(user, ()) for user in node.users))
    return frozenset(
        node
        for node, regions in readers.items()
        if node in region_of and node not in recording.results and regions - {region_of[node]}
    )


def _derived(
    recording: Recording, nodes: list[fx.Node], kinds: tuple[type, ...], counts: Callable[[fx.Node], bool]
) -> frozenset[fx.Node]:
    """Return the nodes that count and are made of these kinds of inputs alone, without draws or writes."""
    written = written_memory(nodes)
    known = {
        node
        for node, origin in recording.origins.items()
        if isinstance(origin, kinds) and memory_of(node) not in written
    }
    inputs = frozenset(known)
    for node in nodes:
        if all(source in known for source in node.all_input_nodes) and not draws(node) and counts(node):
            known.add(node)
    return frozenset(known - inputs)


def _expert_areas(
    recording: Recording, nodes: list[fx.Node], everywhere: frozenset[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return the nodes that depend on routed rows, up to and with the `unroute`, each with its `route`."""
    anywhere = {node for node, origin in recording.origins.items() if not isinstance(origin, Batch)}
    anywhere |= everywhere
    routed: dict[fx.Node, fx.Node] = {}  # what a `route` returns and what is made of it
    area: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        reads = [source for source in node.all_input_nodes if source not in anywhere]
        routes = {routed[source] for source in reads if source in routed}
        if _is_result_of_route(node):
            routed[node] = reads[0]
        elif marker(node) == "unroute":
            rows, counts = node.all_input_nodes[:2]
            if not _is_result_of_route(counts) or routed.get(rows) is not routed[counts]:
                raise _leaves_area(node, "these rows and counts do not come from one route")
            area[node] = routed[counts]
        elif routes:
            outside = [source for source in reads if source not in routed]
            if outside:
                raise _leaves_area(node, f"{outside[0].name}{node_line(outside[0])} was not routed")
            if len(routes) > 1 or marker(node) or node in recording.results:
                raise _leaves_area(node, "these rows have not been unrouted")
            routed[node] = area[node] = routes.pop()
    return area


def _is_result_of_route(node: fx.Node) -> bool:
    return node.target is operator.getitem and marker(node.all_input_nodes[0]) == "route"


def _leaves_area(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        "what lies between route and unroute must come from the rows, the counts and the weights",
        by=f"{node.name}{node_line(node)}",
        facts={"but": why},
        hint="write rows, counts = route(x, counts), make y from these rows, and end with unroute(y, counts, "
        "n); use everything else before or after: the rows may be on another device",
    )


def _region_of(recording: Recording, nodes: list[fx.Node]) -> dict[fx.Node, Tags]:
    """Give nodes outside every annotation the region of their producers, else of their users."""
    region_of = {node: recording.tags[node] for node in nodes if recording.tags[node]}
    loss = recording.results[0]
    first = {tags: place for place, tags in enumerate(dict.fromkeys(region_of.values()), start=1)}
    for node in nodes:
        if node not in region_of:
            producers = [region_of[source] for source in node.all_input_nodes if source in region_of]
            if producers:
                region_of[node] = max(producers, key=first.__getitem__)
    for node in reversed(nodes):
        if node not in region_of:
            users = [region_of[user] for user in node.users if user in region_of]
            # What nothing reads is a result, and runs where the loss does.
            users = users or [region_of.get(loss, ())]
            region_of[node] = min(users, key=lambda tags: first.get(tags, 0))
    return region_of
