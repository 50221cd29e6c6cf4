"""Which devices hold and run each chunk, which of them run one program, and how transfers pair them up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from piper.errors import ScheduleError
from piper.ir.chunk import Tags
from piper.ir.chunk_options import Policy
from piper.ir.devices import Devices, show
from piper.ir.graph import Graph
from piper.ir.grouping import grouped
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
    """Return the microbatches by the devices that run them, from the first microbatch on."""
    # There is one layout unless a directive places single microbatches.
    common = {chunk: placed(graph, node) for chunk, node in first_nodes(graph).items()}
    moved = spread(graph)
    by_part: dict[Tags, dict[str, Compute]] = {}
    for node in graph.nodes.values():
        nodes = by_part.setdefault(node.part, {})
        if node.chunk in moved:
            nodes.setdefault(node.chunk, node)
    by_devices = grouped(
        (frozenset((chunk, node.devices) for chunk, node in nodes.items()), part)
        for part, nodes in by_part.items()
    )
    layouts = []
    for same in by_devices.values():
        own = {chunk: placed(graph, node) for chunk, node in by_part[same[0]].items()}
        layouts.append(PartPlacements(parts=frozenset(same), placements={**common, **own}))
    return layouts


def spread(graph: Graph) -> dict[str, list[Devices]]:
    """Return the chunks whose microbatches run on several sets of devices, and those sets in order."""
    sets: dict[str, list[Devices]] = {}
    for node in graph.nodes.values():
        placed_on = sets.setdefault(node.chunk, [node.devices])
        if node.devices is not placed_on[0] and node.devices not in placed_on:
            placed_on.append(node.devices)
    return {chunk: placed_on for chunk, placed_on in sets.items() if len(placed_on) > 1}


def first_nodes(graph: Graph) -> dict[str, Compute]:
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


def classes_of(sets: Iterable[Devices]) -> list[Devices]:
    """Return the coarsest groups such that every set is a union of groups, ordered by first device."""
    membership = grouped((device, number) for number, devices in enumerate(sets) for device in devices)
    groups = grouped((tuple(membership[device]), device) for device in sorted(membership))
    return [tuple(devices) for devices in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPairs:
    """Pairs of devices that a transfer joins in the same way, and which rows of the sender's value travel."""

    name: str
    senders: Devices
    receivers: Devices  # the i-th receives from the i-th sender
    rows: tuple[int, int, int]  # from, to, out of: [1, 2) of 2 is the second half
    piece: tuple[int, int]  # which of the receiver's pieces this is, and of how many
    local: bool = False  # sender and receiver are one device: nothing travels


@lru_cache(maxsize=4096)
def channels(
    source: Devices, target: Devices, stream: str, sliced: bool, degrees: tuple[int, int] = (1, 1)
) -> tuple[TransferPairs, ...]:
    """Return the channels by which a value travels from one set of devices to another.

    Each device holds an equal slice of the samples.

    The samples are cut into as many cells as both sets divide; a device holds neighbouring cells. A value
    that is the same for all samples comes to each receiver whole, from one sender. Where neighbours share
    their samples, the i-th of them sends to the i-th; else all hold the same value, and the first sends it.
    """
    pairs_by_channel: dict[
        tuple[tuple[int, int, int], tuple[int, int], bool, int], list[tuple[int, int]]
    ] = {}
    served: dict[tuple[object, ...], int] = {}
    left, right = degrees
    for neighbour in range(right):
        givers, takers = source[neighbour if left == right else 0 :: left], target[neighbour::right]
        n, m = len(givers), len(takers)
        cells = lcm(n, m)
        for j, receiver in enumerate(takers):
            low, high = j * cells // m, (j + 1) * cells // m
            senders = range(low * n // cells, (high - 1) * n // cells + 1)
            for place, i in enumerate(senders if sliced else senders[:1]):
                first, last = i * cells // n, (i + 1) * cells // n
                rows = (max(low, first) - first, min(high, last) - first, last - first)
                if not sliced or rows == (0, last - first, last - first):
                    rows = (0, 1, 1)
                sender = givers[i]
                channel = (rows, (place, len(senders) if sliced else 1), sender == receiver)
                nth = served[channel, sender] = served.get((channel, sender), -1) + 1  # once in a channel
                pairs_by_channel.setdefault((*channel, nth), []).append((sender, receiver))
    label = f"{show(source)}{'>' if sliced else '>>'}{show(target)}" + (f":{stream}" if stream else "")
    if degrees != (1, 1):
        label += f"/{left}:{right}"
    return tuple(
        TransferPairs(
            name=f"{label}/{number}" if len(pairs_by_channel) > 1 else label,
            senders=tuple(sender for sender, _ in pairs),
            receivers=tuple(receiver for _, receiver in pairs),
            rows=rows,
            piece=piece,
            local=local,
        )
        for number, ((rows, piece, local, _), pairs) in enumerate(pairs_by_channel.items())
    )
