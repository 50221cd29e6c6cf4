"""The specification that plans are proven against: the captured model and what the directives made of it.

It is read from the graph alone. Nothing here, and nothing in this package, may import the lowering.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from piper.ir.chunk import ROUTED, Chunk, Output, Parameter, Source, Tags
from piper.ir.devices import Devices
from piper.ir.graph import Graph, microbatches_of
from piper.ir.grouping import grouped
from piper.ir.mesh import EXPERTS, GROUPS, OWNERS, Axis, Mesh
from piper.ir.sharding import AxisPlacement, Shard, Sharding, refined, shardings_on
from piper.ir.step_sums import step_sums

OUTER = (OWNERS, GROUPS)  # axes along which devices hold the same shard of ZeRO
Numbering = tuple[tuple[Axis, int], ...]
# ^ of the shards that devices with the same samples hold: for each axis, what a step along it adds
Layout = tuple[frozenset[Tags], Mapping[str, Mesh]]
# ^ microbatches that run on the same devices, and the mesh of each chunk for them


def numbering(mesh: Mesh, axes: Sequence[Axis] | None = None) -> Numbering:
    """Return how the devices of a mesh number their shards: as a producer does, along some of its axes."""
    return tuple((mesh.axis(axis.name), axis.stride) for axis in (mesh.sharing if axes is None else axes))


def shard_number(position: int, numbered: Numbering) -> int:
    """Return the number of the shard that a device holds, from its position in its mesh."""
    return sum(axis.coordinate(position) * worth for axis, worth in numbered)


def in_any_order(shardings: Sequence[Sharding]) -> tuple[Sharding, ...]:
    """Return shardings in a canonical order. The order matters only within one dimension."""
    return tuple(sorted(shardings, key=lambda sharding: sharding.dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How the devices of a region hold a parameter, before ZeRO, and which gradients are summed.

    Regions that share a parameter must agree in all that is compared; in each, other axes may hold terms.
    """

    shardings: tuple[Sharding, ...]
    own: Numbering  # axes along which each device has the whole gradient of what it holds
    summed: Numbering = field(compare=False)  # axes along which each device has a term of it
    experts: int  # over how many devices the experts are sharded
    distinct: tuple[Axis, ...]  # devices that differ along one of these do not add their gradients
    across: tuple[Axis, ...] = field(default=(), compare=False)  # under ZeRO they add them shard by shard
    owners: tuple[Axis, ...] = field(default=(), compare=False)  # and keep a part of each shard

    @property
    def slices(self) -> int:
        """Return into how many different slices the parameter is cut."""
        return math.prod(sharding.degree for sharding in self.shardings)


@lru_cache(maxsize=1024)  # many parameters of a region are sharded alike
def holding(mesh: Mesh, placements: tuple[AxisPlacement, ...]) -> Holding:
    """Return how a region holds a parameter."""
    shardings = shardings_on(mesh, placements)
    mesh = refined(mesh, placements)
    sharded = {each.axis for each in placements if isinstance(each.placement, Shard)}
    summed = {each.axis for each in placements if each.partial} - sharded
    own = [axis for axis in mesh.sharing if axis.name not in summed]
    apart = [axis for axis in mesh.axes if axis in own or axis.name in sharded]
    shards = math.prod(axis.degree for axis in mesh.axes if axis not in apart and axis.name not in OUTER)
    return Holding(
        shardings=in_any_order(shardings),
        own=numbering(mesh, own),
        summed=numbering(mesh, [axis for axis in mesh.sharing if axis.name in summed]),
        experts=math.prod(each.degree for each in placements if each.axis == EXPERTS),
        distinct=tuple(apart),
        across=tuple(axis for axis in mesh.axes if axis.name == GROUPS and shards > 1),
        owners=tuple(axis for axis in mesh.axes if axis.name == OWNERS and shards > 1),
    )


class Specification:
    """What a step must compute: placements, microbatches, data flow, losses and gradients."""

    def __init__(self, graph: Graph, *, clip: bool) -> None:
        self.graph, self.outline = graph, graph.outline
        self.chunks: Mapping[str, Chunk] = graph.chunks
        self.part_devices: dict[str, dict[Tags, Devices]] = {}  # by chunk and microbatch
        for node in graph.nodes.values():
            self.part_devices.setdefault(node.chunk, {})[node.part] = node.devices
        self.placement = {name: union_of(sets.values()) for name, sets in self.part_devices.items()}
        self.devices = graph.devices()
        self.microbatches = {name: microbatches_of(axes) for name, axes in graph.parts.items()}
        self.axes = dict(axis for axes in graph.parts.values() for axis in axes)
        first = {name: next(iter(self.part_devices[name].values())) for name in self.chunks}
        self.meshes = {name: graph.policy(name).mesh(devices) for name, devices in first.items()}
        self.layouts = self._layouts()
        self.cells = math.lcm(*{mesh.slices for mesh in self.meshes.values()})
        loss = self.outline.loss.chunk
        slices = self.meshes[loss].slices * len(self.microbatches[loss])
        self.seed = 1.0 if self.outline.weight is not None else 1.0 / slices  # what backwards start from
        self.copies = self.meshes[loss].degree
        self.shares = max(map(self.degree, self.chunks))
        self.mutated = frozenset(name for chunk in self.outline.chunks for name in chunk.mutated)
        self.sums = step_sums(graph, clip=clip)
        self.microbatch_sums = {each.slot: each.source for each in self.sums if each.source is not None}
        trainable = {param.name for param in self.outline.parameters if param.trainable}
        self.contributors = grouped(  # the chunks whose backward gives each a gradient
            (name, chunk.name)
            for chunk in self.outline.chunks
            if "B" in chunk.phases
            for name in trainable.intersection(chunk.phases["B"].grad_params)
        )
        self.readers = self._readers(backward=True)
        self._whole = {backward: self._whole_axes(backward=backward) for backward in (False, True)}

    def experts(self, chunk: str) -> Axis | None:
        """Return the axis over which the experts of a chunk are sharded. None: it has none."""
        captured = self.chunks[chunk]
        if captured.collective is not None:  # rows of experts stay such
            source = captured.inputs[0]
            routed = isinstance(source, Output) and self.chunks[source.chunk].kind != "unroute"
            return self.experts(source.chunk) if routed and isinstance(source, Output) else None
        return self.meshes[chunk].experts if captured.kind in ROUTED else None

    def degree(self, chunk: str) -> int:
        """Return over how many devices the experts of a chunk are sharded; 1: it has none."""
        experts = self.experts(chunk)
        return 1 if experts is None else experts.degree

    def moves_nothing(self, chunk: str, *, backward: bool = False) -> bool:
        """Return whether a chunk only passes its inputs on, or its gradients.

        A route or an unroute does between devices that hold all experts, and a collective in one direction.
        """
        captured = self.chunks[chunk]
        if captured.collective is not None:
            return (captured.collective.back if backward else captured.collective.op) == "none"
        return captured.kind in ("route", "unroute") and self.degree(chunk) == 1

    def resolve(self, source: Source, *, backward: bool = False) -> Source:
        """Return the source of a value, or what its gradient is of, seen through chunks that pass it on."""
        while isinstance(source, Output) and self.moves_nothing(source.chunk, backward=backward):
            source = self.chunks[source.chunk].inputs[source.index]
        return source

    def routed(self, chunk: str) -> bool:
        """Return whether the outputs of a chunk are rows that lie with sharded experts."""
        return self.chunks[chunk].kind in ("route", "expert", "collective") and self.degree(chunk) > 1

    def holding(self, chunk: str, param: Parameter) -> Holding:
        """Return how the devices of a chunk hold a parameter between them."""
        policy = self.graph.policy(chunk)
        by_expert = policy.placements(param.name)
        return holding(policy.mesh(self.placement[chunk]), (*param.placements, *by_expert))

    def cuts(self, chunk: str, field: str) -> tuple[Sharding, ...]:
        """Return how the devices of a chunk shard a field of the batch beyond its samples."""
        placements = self.graph.policy(chunk).field_placements(field)
        return in_any_order(shardings_on(self.meshes[chunk], placements))

    def numbering_at(self, producer: str, index: int, reader: str, *, backward: bool = False) -> Numbering:
        """Return how the devices of a reader number the shards of an output, or of its gradient."""
        mesh, readers = self.meshes[producer], self.meshes[reader]
        if self.routed(producer):
            mesh, readers = mesh.by_expert, readers.by_expert
        whole = self._whole[backward].get((producer, index), frozenset())
        return numbering(readers, [axis for axis in mesh.sharing if axis.name not in whole])

    def is_sample_independent(self, chunk: str, position: int) -> bool:
        """Return whether an input is the same for all samples.

        It is where its producer sees slices of another size and yet gives the same shape.
        """
        source = self.resolve(self.chunks[chunk].inputs[position])
        if (
            not isinstance(source, Output)
            or self.meshes[source.chunk].slices == self.meshes[chunk].slices
            or self.numbering_at(source.chunk, source.index, chunk)
        ):
            return False
        given = self.chunks[source.chunk].outputs[source.index].shape
        return given == self.chunks[chunk].input_specs[position].shape != ()

    def in_order(self, chunk: str) -> bool:
        """Return whether the forwards of a chunk must run in the order of their microbatches."""
        wanted = [[microbatch] for microbatch in self.microbatches[chunk]]
        for ordering in self.graph.orderings:
            groups = (
                [s.part for s in group if (s.chunk, s.phase) == (chunk, "F")] for group in ordering.groups
            )
            if [group for group in groups if group] == wanted:
                return True
        return not self.graph.orderings

    def _readers(self, *, backward: bool) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """Find the inputs that read each output, or through which it gets its gradient."""
        readers: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for chunk in self.outline.chunks:
            if self.moves_nothing(chunk.name, backward=backward):
                continue
            positions: Sequence[int] = range(len(chunk.inputs))
            if backward:
                positions = chunk.phases["B"].grad_inputs if "B" in chunk.phases else ()
            for position in positions:
                source = self.resolve(chunk.inputs[position], backward=backward)
                if isinstance(source, Output):
                    readers.setdefault((source.chunk, source.index), []).append((chunk.name, position))
        return readers

    def _layouts(self) -> list[Layout]:
        """Find the microbatches that run on the same devices, chunk by chunk: all, unless some are apart."""
        parts = dict.fromkeys(part for some in self.microbatches.values() for part in some)
        apart = [name for name, sets in self.part_devices.items() if len(set(sets.values())) > 1]
        by_devices = grouped((tuple(self.part_devices[n].get(part) for n in apart), part) for part in parts)
        layouts: list[Layout] = []
        for sets, same in by_devices.items():
            placed = ((n, devices) for n, devices in zip(apart, sets, strict=True) if devices is not None)
            own = {name: self.graph.policy(name).mesh(devices) for name, devices in placed}
            layouts.append((frozenset(same), self.meshes | own))
        return layouts

    def _whole_axes(self, *, backward: bool) -> dict[tuple[str, int], frozenset[str]]:
        """Find the axes along which each output, or its gradient, is the same at all places.

        It is where a reader is not sharded like its producer: capture gathers it there.
        """
        whole: dict[tuple[str, int], frozenset[str]] = {}
        for output, readers in self._readers(backward=backward).items():
            mesh = self.meshes[output[0]]
            as_shards = all(mesh.sharing == self.meshes[reader].sharing for reader, _ in readers)
            whole[output] = frozenset(() if as_shards else (axis.name for axis in mesh.sharing))
        return whole


def union_of(sets: Iterable[Devices]) -> Devices:
    """Return the devices of several sets, each once, in order."""
    first, *others = dict.fromkeys(sets)
    return tuple(dict.fromkeys((*first, *(d for devices in others for d in devices)))) if others else first
