"""Decides what directives left open, and refuses what cannot run."""

import math
from collections.abc import Iterator
from dataclasses import replace

from piper.errors import ScheduleError
from piper.ir.chunk import ROUTED, Chunk, Tags
from piper.ir.devices import Devices, show
from piper.ir.format import listed
from piper.ir.graph import Graph
from piper.ir.mesh import REPLICAS, groups_apart
from piper.ir.node import Compute
from piper.lower.placements import layouts_of, placements_of, spread
from piper.lower.state import LoweringState


def validate(graph: Graph, samples: int | None = None) -> Graph:
    """Place a strategy without placements on device 0, and refuse a graph that cannot run.

    F[PP=0]  B[PP=0]
    -->
    F[PP=0]@0  B[PP=0]@0

    samples: in the global batch. None: any number that divides.
    """
    if not any(node.devices for node in graph.nodes.values()):
        graph = graph.update(replace(node, devices=(0,)) for node in graph.nodes.values())
    check_placed(graph)
    check_one_placement(graph)
    check_groups(graph)
    check_within(graph)
    check_sets(graph)
    check_axes(graph)
    check_expert_regions(graph)
    check_reruns(graph)
    check_precisions(graph)
    check_fp8_gathers(graph)
    check_batch(graph, samples)
    return graph


def drop_idle_nodes(state: LoweringState) -> LoweringState:
    """Drop the nodes whose chunk has nothing to do in their phase.

    F[PP=0]  BI[PP=0 MB=1] (nothing to give back)  BW[PP=0 MB=1]
    -->
    F[PP=0]  BW[PP=0 MB=1]
    """
    graph, chunks = state.graph, state.graph.chunks
    nodes = {name: node for name, node in graph.nodes.items() if not is_idle(chunks[node.chunk], node)}
    graph = replace(graph, nodes=nodes)
    check_expert_buffers(graph)
    return replace(state, graph=graph)


def every_node_has_a_place_and_a_phase(state: LoweringState) -> Iterator[str]:
    """Yield each node that is not placed, or has nothing to do."""
    # The backward of a route or a collective is done in its BI half; it has no BW half.
    chunks = state.graph.chunks
    for node in state.graph.nodes.values():
        if not node.devices:
            yield f"{node.name} is not placed"
        chunk = chunks[node.chunk]
        moves = chunk.kind in ("route", "unroute", "collective") and node.phase == "BI"
        if is_idle(chunk, node) or (node.phase not in chunk.phases and not moves):
            yield f"{node.name} has nothing to do"


def is_idle(chunk: Chunk, node: Compute) -> bool:
    """Return whether a node of this phase would do nothing."""
    if node.phase == "F" or not chunk.phases:
        return False
    if "B" not in chunk.phases:
        return True
    if chunk.kind in ("route", "unroute", "collective"):
        return node.phase == "BW"  # values travel in the first half
    if node.phase == "BI":
        spec = chunk.phases["BI"]
        return not spec.grad_inputs and not chunk.carried
    return node.phase == "BW" and not chunk.phases["BW"].grad_params


def check_placed(graph: Graph) -> None:
    """Refuse a graph with nodes that are not placed."""
    unplaced = [node.name for node in graph.nodes.values() if not node.devices]
    if unplaced:
        placed = next(node for node in graph.nodes.values() if node.devices)
        raise ScheduleError(
            f"{unplaced[0]} is placed on no device",
            by="strategy",
            facts={"unplaced": listed(unplaced), "placed": f"{placed.name} on {show(placed.devices)}"},
            hint="place every region, or none for a single device",
        )


def check_groups(graph: Graph) -> None:
    """Refuse a sharded region whose devices do not form groups, whichever directive placed it last."""
    for node in graph.nodes.values():
        policy = graph.policy(node.chunk)
        # Where experts cannot be sharded at all, more devices would not help: `check_expert_regions` says so.
        size = policy.inner if policy.splits_experts else policy.degree
        if len(node.devices) % size:
            axes = [f"{axis.axis}={axis.degree}" for axis in policy.axes]
            experts = [f"experts={policy.ways}"] if policy.ways > 1 else []
            both = {"groups": " x ".join([*axes, *experts])} if axes else {}
            raise ScheduleError(
                f"{len(node.devices)} devices cannot form groups of {size}",
                by=graph.placed_by(node),
                facts={"region": node.chunk, "devices": show(node.devices), **both},
                hint=f"place the region on a multiple of {size} devices, or choose other `ways`",
            )


def check_within(graph: Graph) -> None:
    """Refuse groups for ZeRO that the devices of a region do not form, or that cut its other groups apart."""
    for placement in placements_of(graph).values():
        policy, devices, within = placement.policy, placement.devices, placement.policy.within
        if within is None:
            continue
        axes = [f"{axis.axis}={axis.degree}" for axis in policy.axes]
        axes += [f"experts={policy.ways}"] if policy.ways > 1 else []
        facts = {"region": placement.chunk, "devices": show(devices)}
        by = placement.by if policy.origin is None else graph.directives[policy.origin].title
        owners = policy.optimizer_within or within
        if len(devices) % within or len(devices) % owners or owners % within:
            more = "" if owners == within else f", of which optimizer_within={owners} hold several"
            raise ScheduleError(
                f"{len(devices)} devices cannot form groups of within={within}{more}",
                by=by,
                facts=facts,
                hint="choose a divisor of the number of devices; optimizer_within is a multiple of within",
            )
        if within % policy.inner and policy.inner < len(devices):
            raise ScheduleError(
                f"within={within} would cut groups of {policy.inner} devices apart",
                by=by,
                facts={**facts, "groups": " x ".join(axes)},
                hint=f"choose a multiple of {policy.inner}: ZeRO shards what such groups hold alike",
            )


def check_axes(graph: Graph) -> None:
    """Refuse a sequence that would be sharded twice in an order that shards cannot have."""
    for node in graph.nodes.values():
        axes = graph.policy(node.chunk).axes
        # The outer axis is sharded first. A replicated value that it cuts, such as embeddings of positions,
        # would then be cut once more by the inner one; sharded values hold the outer slice of an inner one.
        inner = next((axis for axis in axes if axis.fields), None)
        outer = next((axis for axis in axes[axes.index(inner) :] if axis.between), None) if inner else None
        if inner is not None and outer is not None:
            raise ScheduleError(
                "a sequence that is sharded already cannot be sharded again between regions",
                by=graph.directives[outer.origin].title,
                facts={"first": graph.directives[inner.origin].title, "asked": "between="},
                hint="put the shard with between= first: its groups are then innermost",
            )


def check_one_placement(graph: Graph) -> None:
    """Refuse a microbatch of a chunk on two sets of devices: its saved values live where its forward runs."""
    placements: dict[tuple[str, Tags], Compute] = {}
    for node in graph.nodes.values():
        first = placements.setdefault((node.chunk, node.part), node)
        if first.devices is not node.devices and first.devices != node.devices:
            raise ScheduleError(
                f"{node.chunk} would live in two places",
                by=graph.placed_by(node),
                facts={first.name: f"on {show(first.devices)}", node.name: f"on {show(node.devices)}"},
                hint="place all passes of a microbatch on the same devices",
            )


def check_sets(graph: Graph) -> None:
    """Refuse microbatches of a chunk on sets of devices that cannot hold the chunk's parameters together."""
    for chunk, sets in spread(graph).items():
        mine = [node for node in graph.nodes.values() if node.chunk == chunk]
        first, *others = nodes = [next(node for node in mine if node.devices == devices) for devices in sets]
        groups: set[Devices] = set()  # that share samples or shard experts together: they are no replicas
        for mesh in map(graph.mesh, nodes):
            replicas = tuple(axis for axis in mesh.axes if axis.name in REPLICAS)
            groups.update(groups_apart(mesh.devices, replicas))
        for node in others:
            facts = {each.name: f"on {show(each.devices)}" for each in (first, node)}
            if len(node.devices) != len(first.devices):
                raise ScheduleError(
                    f"the microbatches of {chunk} are on sets of different sizes",
                    by=graph.placed_by(node),
                    facts=facts,
                    hint="place them on sets of one size: they get slices of the samples of one size",
                )
            size = len(next(iter(groups)))
            if sum(map(len, groups)) > len({device for group in groups for device in group}):
                raise ScheduleError(
                    f"the groups of {size} devices that shard {chunk} contradict each other",
                    by=graph.placed_by(node),
                    facts=facts,
                    hint="put each device into the same group, at the same place, for all microbatches",
                )


def check_expert_regions(graph: Graph) -> None:
    """Refuse an expert region on two sets of devices: rows after a route belong to no sample."""
    chunks = graph.chunks
    for layout in layouts_of(graph):
        for chunk in graph.outline.chunks:
            placement = layout.placements[chunk.name]
            ways = placement.policy.ways
            if chunk.kind in ROUTED and not placement.policy.splits_experts:
                policy = placement.policy
                own = [f"{axis.axis}={axis.degree}" for axis in policy.axes if axis.axis in policy.own_rows]
                every = " x ".join(f"{axis.axis}={axis.degree}" for axis in policy.axes)
                raise ScheduleError(
                    f"experts cannot be sharded over groups of {ways} neighbouring devices",
                    by=placement.by,
                    facts={"axes": every, "own rows": ", ".join(own)},
                    hint="choose `ways` that divide the devices along these axes, or a multiple of them, and "
                    "put other axes before them",
                )
            if chunk.kind not in ("expert", "unroute"):
                continue
            for source in chunk.sources:
                producer = layout.placements[source.chunk]
                if chunks[source.chunk].kind not in ("route", "expert"):
                    continue
                if producer.devices != placement.devices or producer.policy.ways != ways:
                    raise ScheduleError(
                        "an expert region would be cut apart",
                        by=placement.by,
                        facts={
                            each.chunk: f"on {show(each.devices)}, ways {each.policy.ways}"
                            for each in (producer, placement)
                        },
                        hint="select the whole region from its route to its unroute",
                    )


def check_expert_buffers(graph: Graph) -> None:
    """Refuse to shard a buffer that a region writes, or that a region with other experts uses too."""
    outline = graph.outline
    placements = {node.chunk: node for node in graph.nodes.values()}
    users: dict[str, str] = {}
    for chunk in outline.chunks:
        for name in chunk.buffers:
            first = users.setdefault(name, chunk.name)
            degrees = {
                user: math.prod(along.degree for along in graph.policy(user).placements(name))
                for user in (first, chunk.name)
            }
            sharded = max(first, chunk.name, key=lambda user: degrees[user])
            if degrees[first] != degrees[chunk.name]:
                reason = f"{first} and {chunk.name} share it"
            elif name in chunk.mutated and degrees[sharded] > 1:
                reason = f"{chunk.name} writes it, from the rows of {degrees[sharded]} devices at once"
            else:
                continue
            where = f"{show(placements[sharded].devices)} for {sharded}"
            raise ScheduleError(
                f"the buffer {name} cannot be sharded with its experts",
                by=graph.placed_by(placements[sharded]),
                facts={"asked": f"ways {degrees[sharded]} over {where}", "but": reason},
                hint="give each region a buffer of its own, which only what lies outside route and unroute "
                "writes, or do not shard this region",
            )


def check_reruns(graph: Graph) -> None:
    """Refuse to recompute chunks that use written buffers: the second run would read other values."""
    placements = {node.chunk: node for node in graph.nodes.values()}
    written = {name for chunk in graph.outline.chunks for name in chunk.mutated}
    for chunk in graph.outline.chunks:
        used = dict.fromkeys((*chunk.buffers, *chunk.mutated))
        changing = [name for name in used if name in written]
        if graph.options[chunk.name].rerun is not None and changing:
            asked = [graph.directives[number] for number in placements[chunk.name].origin]
            raise ScheduleError(
                f"{chunk.name} uses buffers that change, so its forward cannot run again",
                by=next(each.title for each in reversed(asked) if each.verb == "remat"),
                facts={"buffers": ", ".join(changing)},
                hint="leave this region out of the filter, or leave across= out",
            )


def check_precisions(graph: Graph) -> None:
    """Refuse a tied weight whose products would run in different precisions."""
    placements = {node.chunk: node for node in graph.nodes.values()}
    readers: dict[str, str] = {}  # of each weight: the first chunk that multiplies by it
    for chunk in graph.outline.chunks:
        for name in chunk.products:
            first = readers.setdefault(name, chunk.name)
            both = {each: graph.options[each].products or "the job's" for each in (first, chunk.name)}
            if len(set(both.values())) > 1:
                asked = next(each for each in both if graph.options[each].products is not None)
                made_by = [graph.directives[number] for number in placements[asked].origin]
                raise ScheduleError(
                    f"the products of {name} would have two precisions",
                    by=next(each.title for each in reversed(made_by) if each.verb == "precision"),
                    facts=both,
                    hint="select both regions, or neither",
                )


def check_fp8_gathers(graph: Graph) -> None:
    """Refuse to gather in fp8 where nothing is gathered."""
    named = sorted(graph.chosen(lambda options: options.gather))
    if named and not any(graph.policy(name).zero == 3 for name in named):
        asked = (each for each in reversed(graph.directives) if each.verb == "precision")
        raise ScheduleError(
            "none of these regions gathers its parameters",
            by=next(asked).title,
            facts={name: f"zero={graph.policy(name).zero}" for name in named[:3]},
            hint="gather applies to replicate(..., zero=3); leave it out elsewhere",
        )


def cells_per_device(graph: Graph) -> int:
    """Return the number of slices of the samples before microbatches: every set of devices divides it."""
    sets = {(node.chunk, len(node.devices)): node for node in graph.nodes.values()}
    return math.lcm(*{graph.mesh(node).slices for node in sets.values()})


def parts_of(graph: Graph, chunk: str) -> int:
    return len(graph.microbatches(chunk))


def check_batch(graph: Graph, samples: int | None) -> None:
    """Refuse a batch whose samples do not divide evenly over devices and microbatches."""
    if samples is None:
        return
    slices = cells_per_device(graph)
    for chunk in graph.parts:
        parts = parts_of(graph, chunk)
        if samples % (slices * parts):
            axes = " x ".join(f"{axis}={size}" for axis, size in graph.parts[chunk])
            raise ScheduleError(
                f"{samples} samples do not divide into {slices * parts} equal pieces",
                by="strategy",
                facts={
                    "devices": f"{slices} slices of the samples",
                    "parts": f"{parts} in each slice" + (f" ({axes})" if axes else ""),
                },
                hint=f"use a batch that is a multiple of {slices * parts}, fewer parts or fewer devices",
            )
