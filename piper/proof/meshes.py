"""How the devices of a region hold values and parameters: which shards, and which gradients are summed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from piper.ir.mesh import EXPERTS, GROUPS, OWNERS, Axis, Mesh
from piper.ir.sharding import AxisPlacement, Shard, Sharding, refined, shardings_on

OUTER = (OWNERS, GROUPS)  # axes along which devices hold the same shard of ZeRO
Numbering = tuple[tuple[Axis, int], ...]
# ^ of the shards that devices with the same samples hold: for each axis, what a step along it adds


def numbering(mesh: Mesh, producer: Mesh | None = None, axes: Sequence[Axis] | None = None) -> Numbering:
    """Return how the devices of a mesh number their shards: as a producer does, along some of its axes."""
    producer = producer or mesh
    return tuple((mesh.axis(axis.name), axis.stride) for axis in (producer.sharing if axes is None else axes))


def shard_number(position: int, numbered: Numbering) -> int:
    """Return the number of the shard that a device holds, from its position in its mesh."""
    return sum(axis.coordinate(position) * worth for axis, worth in numbered)


def passes(mesh: Mesh, other: Mesh) -> bool:
    """Return whether values may pass to another region as shards, device by device.

    Capture gathers a value that leaves for regions with other axes.
    """
    return mesh.sharing == other.sharing


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
        own=numbering(mesh, axes=own),
        summed=numbering(mesh, axes=[axis for axis in mesh.sharing if axis.name in summed]),
        experts=math.prod(each.degree for each in placements if each.axis == EXPERTS),
        distinct=tuple(apart),
        across=tuple(axis for axis in mesh.axes if axis.name == GROUPS and shards > 1),
        owners=tuple(axis for axis in mesh.axes if axis.name == OWNERS and shards > 1),
    )
