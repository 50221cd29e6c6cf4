"""The devices of each chunk: those that hold its parameters, and those that run each microbatch."""

from dataclasses import dataclass, replace

from piper.errors import ScheduleError
from piper.ir.chunk import Tags
from piper.ir.chunk_options import Policy
from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.mesh import Mesh
from piper.ir.node import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlacement:
    """The placement of a chunk: its devices and its policy."""

    chunk: str
    devices: Devices  # that run a microbatch, or that hold the parameters
    policy: Policy
    origin: tuple[int, ...]
    by: str  # the directive that put it there

    @property
    def mesh(self) -> Mesh:
        """Return how the devices are arranged."""
        return self.policy.mesh(self.devices)

    @property
    def samples(self) -> tuple[Devices, int]:
        """Return what decides which samples a device has: the devices, and how many share each slice."""
        return self.devices, self.mesh.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlacements:
    """Microbatches that run on the same devices, chunk by chunk, and the placements of chunks for them."""

    parts: frozenset[Tags]
    placements: dict[str, ChunkPlacement]


def placements_of(graph: Graph) -> dict[str, ChunkPlacement]:
    """Return where the parameters of each chunk live: on every device that runs one of its microbatches."""
    placements = {chunk: placed(graph, node) for chunk, node in first_nodes(graph).items()}
    for chunk, sets in spread(graph).items():
        devices = tuple(dict.fromkeys(device for members in sets for device in members))
        placements[chunk] = replace(placements[chunk], devices=devices)
    return placements


def layouts_of(graph: Graph) -> list[PartPlacements]:
    """Return the microbatches by the devices that run them, from the first microbatch on.

    There is one layout unless a directive places single microbatches.
    """
    common = {chunk: placed(graph, node) for chunk, node in first_nodes(graph).items()}
    parts = dict.fromkeys(cell.part for cell in graph.index.cells)
    moved = spread(graph)
    if not moved:
        return [PartPlacements(parts=frozenset(parts), placements=common)]
    by_part: dict[Tags, dict[str, Compute]] = {part: {} for part in parts}
    for node in graph.nodes.values():
        if node.chunk in moved:
            by_part[node.part].setdefault(node.chunk, node)
    by_devices: dict[frozenset[tuple[str, Devices]], list[Tags]] = {}
    for part, nodes in by_part.items():
        by_devices.setdefault(frozenset((chunk, node.devices) for chunk, node in nodes.items()), []).append(
            part
        )
    return [
        PartPlacements(
            parts=frozenset(same),
            placements={
                **common,
                **{chunk: placed(graph, node) for chunk, node in by_part[same[0]].items()},
            },
        )
        for same in by_devices.values()
    ]


def spread(graph: Graph) -> dict[str, list[Devices]]:
    """Return the chunks whose microbatches run on several sets of devices, and those sets in order."""
    sets: dict[str, list[Devices]] = {}
    for node in graph.nodes.values():
        placed_on = sets.setdefault(node.chunk, [node.devices])
        if node.devices is not placed_on[0] and node.devices not in placed_on:
            placed_on.append(node.devices)
    return {chunk: placed_on for chunk, placed_on in sets.items() if len(placed_on) > 1}


def first_nodes(graph: Graph) -> dict[str, Compute]:
    """Return the first node of each chunk."""
    first: dict[str, Compute] = {}
    for node in graph.nodes.values():
        first.setdefault(node.chunk, node)
    return first


def placed(graph: Graph, node: Compute) -> ChunkPlacement:
    """Return the placement of a chunk as one of its nodes has it."""
    return ChunkPlacement(
        chunk=node.chunk,
        devices=node.devices,
        policy=graph.policy(node.chunk),
        origin=node.origin,
        by=graph.placed_by(node),
    )


def clones_of(placements: tuple[ChunkPlacement, ...]) -> int:
    """Return how many experts of other devices each device has room for. Refuse what they do not go with."""
    clones = placements[0].policy.clones
    if not clones:
        return 0
    policy = placements[0].policy
    reasons = {
        "axes": " x ".join(f"{axis.axis}={axis.degree}" for axis in policy.axes),
        "tied": ", ".join(each.chunk for each in placements) if len(placements) > 1 else "",
        "ZeRO": f"within={policy.within}" if policy.within is not None else "",
    }
    for fact, reason in reasons.items():
        if reason:
            raise ScheduleError(
                "these experts cannot be cloned on other devices",
                by=placements[0].by,
                facts={"asked": f"clones={clones} for {placements[0].chunk}", fact: reason},
                hint="leave out clones, or what does not go with them",
            )
    return clones
