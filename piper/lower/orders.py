"""Temporal edges: those that `order` directives ask for, or a pipeline order where there are none."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from piper.errors import ScheduleError
from piper.ir.devices import Devices, show
from piper.ir.graph import SELECTED, Graph, Ordering, microbatches_of
from piper.ir.ids import Pass, SlotId
from piper.ir.node import Node, compute_name
from piper.lower.placements import classes_of, first_nodes, layouts_of
from piper.lower.state import LoweringState, Temporal


def add_orders(state: LoweringState) -> LoweringState:
    """Turn orders into temporal edges on each device, from the ends of a group to the starts of the next.

    order([[F MB=0], [F MB=1]])
    -->
    F[PP=0 MB=0] ..> F[PP=0 MB=1]
    """
    nodes: dict[str, Node] = {node.name: node for node in state.nodes}
    edges: list[Temporal] = []
    if state.graph.orderings:
        for ordering in state.graph.orderings:
            for groups in variants(state.graph, ordering):
                edges += chain_groups(state.graph, ordering.by, groups, nodes)
    else:
        edges += limit_in_flight(state.graph)
        edges += keep_buffers_in_step(state.graph)
    return replace(state, temporal=tuple(dict.fromkeys(edges)))


def edges_join_nodes_that_exist(state: LoweringState) -> Iterator[str]:
    """Yield each temporal edge that does not join two nodes of the graph."""
    names = {node.name for node in state.nodes}
    for first, then, _ in state.temporal:
        if first not in names or then not in names:
            yield f"{first} ..> {then} leads nowhere"


def variants(graph: Graph, ordering: Ordering) -> Iterator[tuple[tuple[Pass, ...], ...]]:
    """Yield the groups once, or once per microbatch where a later split divided all of them alike."""
    steps = [step for group in ordering.groups for step in group]
    later = {graph.parts[step.chunk][len(step.part) :] for step in steps}
    apart = [[copies(graph, step) for step in group] for group in ordering.groups]
    if len(later) == 1:  # every member was split alike: each microbatch keeps the order
        for number in range(len(microbatches_of(*later))):
            yield tuple(tuple(steps[number] for steps in group) for group in apart)
        return
    yield tuple(tuple(itertools.chain(*group)) for group in apart)


def copies(graph: Graph, step: Pass) -> list[Pass]:
    """Return the copies of a step, one for each microbatch that a later split made of it."""
    later = microbatches_of(graph.parts[step.chunk][len(step.part) :])
    return [replace(step, part=(*step.part, *part)) for part in later]


def chain_groups(
    graph: Graph, by: int, groups: tuple[tuple[Pass, ...], ...], nodes: dict[str, Node]
) -> Iterator[Temporal]:
    """Yield edges from each group to the next one on every device they share."""
    present = [members for group in groups if (members := list(existing(group, nodes)))]
    sets = dict.fromkeys(node.devices for members in present for node in members)
    if len(sets) == 1:
        yield from chain_on_device(by, present)
        return
    check_devices_met(graph, by, present)
    for device, *_ in classes_of(sets):  # sets may overlap: the rest of a class runs the same nodes
        mine = {devices for devices in sets if device in devices}
        here = [[node for node in members if node.devices in mine] for members in present]
        yield from chain_on_device(by, [members for members in here if members])


def existing(group: Iterable[Pass], nodes: dict[str, Node]) -> Iterator[Node]:
    """Yield the nodes of a group. A backward that was split later stands for its two halves."""
    for step in group:
        for phase in SELECTED[step.phase]:
            if (name := compute_name(step.chunk, phase, step.part)) in nodes:
                yield nodes[name]


def check_devices_met(graph: Graph, by: int, groups: list[list[Node]]) -> None:
    """Refuse an order whose neighbouring groups share no device: an order holds on one device only."""
    seen: set[int] = set()
    for place, members in enumerate(groups):
        sets = {node.devices for node in members}
        here = {device for devices in sets for device in devices}
        if place and here.isdisjoint(seen):
            before = groups[place - 1][0]
            raise ScheduleError(
                "the order crosses devices",
                by=graph.directives[by].title,
                facts={
                    "before": f"{before.name} on {show(before.devices)}",
                    "after": f"{members[0].name} on {show(members[0].devices)}",
                },
                hint="order the nodes of one device at a time; data already orders them across devices",
            )
        seen = here


def chain_on_device(by: int, groups: list[list[Node]]) -> Iterator[Temporal]:
    """Yield edges between consecutive groups, from the last nodes of one to the first of the next."""
    for before, after in itertools.pairwise(groups):
        for first in ends(before):
            for then in starts(after):
                yield (first.name, then.name, by)


def ends(members: list[Node]) -> list[Node]:
    """Return the members of a group whose results no other member reads."""
    readers: dict[SlotId, set[str]] = {}
    for node in members:
        for value in node.reads:
            readers.setdefault(value, set()).add(node.name)
    # a buffer that a node both reads and writes is no edge to itself
    return [node for node in members if not any(readers.get(v, set()) - {node.name} for v in node.writes)]


def starts(members: list[Node]) -> list[Node]:
    """Return the members of a group that read no other member's result."""
    writer = {value: node.name for node in members for value in node.writes}
    return [
        node for node in members if all(writer.get(value, node.name) == node.name for value in node.reads)
    ]


def limit_in_flight(graph: Graph) -> Iterator[Temporal]:
    """Yield edges that limit the microbatches in flight, for a graph without an `order`.

    No region runs further ahead of its backward than the pipeline after it is deep. Backwards go first where
    both can run, so this is 1F1B for a plain pipeline.
    """
    depth = depths(graph)
    ordered = [chunk.name for chunk in graph.outline.chunks if chunk.has_code]
    for layout in layouts_of(graph):
        for chunk in ordered:
            parts = [part for part in graph.microbatches(chunk) if part in layout.parts]
            for done, then in zip(parts, parts[depth[chunk] :], strict=False):
                if compute_name(chunk, "B", done) in graph.nodes:
                    yield (compute_name(chunk, "B", done), compute_name(chunk, "F", then), -1)


def keep_buffers_in_step(graph: Graph) -> Iterator[Temporal]:
    """Yield edges that make a region that writes buffers run its microbatches in order."""
    writes = {chunk.name for chunk in graph.outline.chunks if chunk.mutated}
    last: dict[str, dict[Devices, str]] = {}  # of each chunk, on each of its sets of devices
    for node in graph.nodes.values():
        if node.chunk in writes and node.phase == "F":
            before = last.setdefault(node.chunk, {})
            for devices, first in before.items():
                if devices is node.devices or not set(devices).isdisjoint(node.devices):
                    yield (first, node.name, -1)
            before[node.devices] = node.name


def depths(graph: Graph) -> dict[str, int]:
    """Return the number of device sets in a row that each chunk's results pass through, its own included."""
    placements = {chunk: node.devices for chunk, node in first_nodes(graph).items()}
    depth = {chunk.name: 1 for chunk in graph.outline.chunks}
    for chunk in reversed(graph.outline.chunks):
        for source in chunk.sources:
            hop = placements[source.chunk] != placements[chunk.name]
            depth[source.chunk] = max(depth[source.chunk], depth[chunk.name] + hop)
    return depth
