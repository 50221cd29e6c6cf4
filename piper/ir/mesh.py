"""A mesh: devices arranged along named axes. It says which devices share samples, and which form a group."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from piper.ir.devices import Devices
from piper.ir.grouping import grouped

# Names of two words, because a strategy names its axes in one.
EXPERTS = "by expert"  # the axis along which experts are sharded
DATA = "by sample"  # the next axis: its devices take different samples, and sum their gradients
OWNERS = "by owner"  # the next: they hold the same shard of ZeRO, of which each updates its part
GROUPS = "by group"  # the outermost: they hold the same shard, and update the same
REPLICAS = (DATA, OWNERS, GROUPS)  # axes whose devices take different samples, and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a mesh: each group along it has `degree` devices, which lie `stride` apart in the mesh."""

    degree: int
    stride: int = 1
    name: str = ""
    samples: bool = False  # its devices take different samples; else they share them

    def coordinate(self, position: int) -> int:
        """Return where along this axis the device at a position of the mesh lies."""
        return position // self.stride % self.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices arranged along axes, the innermost first: its neighbours are neighbours in `devices`."""

    devices: Devices
    axes: tuple[Axis, ...] = ()
    experts: Axis | None = None  # over which experts are sharded; it covers axes along which rows differ

    @property
    def by_expert(self) -> "Mesh":
        """Return the mesh as experts see it: the axis of the experts in place of those that it covers."""
        if self.experts is None:
            return self
        end = self.experts.stride * self.experts.degree
        inside = [axis for axis in self.axes if axis.stride < self.experts.stride]
        beyond = []
        for axis in self.axes[len(inside) :]:
            begin = max(end, axis.stride)
            if axis.stride >= end or axis.stride * axis.degree > end:
                beyond.append(replace(axis, degree=axis.stride * axis.degree // begin, stride=begin))
        return replace(self, axes=(*inside, self.experts, *beyond))

    @property
    def sharing(self) -> tuple[Axis, ...]:
        """Return the axes whose devices share their samples."""
        return tuple(axis for axis in self.axes if not axis.samples)

    @property
    def degree(self) -> int:
        """Return how many devices share the same samples."""
        return math.prod(axis.degree for axis in self.sharing)

    @property
    def slices(self) -> int:
        """Return into how many slices the samples are cut."""
        return len(self.devices) // self.degree

    def axis(self, name: str) -> Axis:
        return {axis.name: axis for axis in self.axes}[name]

    def groups(self, *names: str) -> tuple[Devices, ...]:
        """Return the groups of devices that differ only in where they lie along some axes, in order."""
        return groups_along(self.devices, tuple(map(self.axis, names)))


def mesh_of(
    devices: Devices, axes: Iterable[Axis], within: int | None = None, owners: int | None = None
) -> Mesh:
    """Return a mesh of some axes, the innermost first. All devices that are left lie along `DATA`.

    within: those inside groups of so many neighbouring devices; the groups lie along `GROUPS`.
    owners: groups among so many neighbouring devices lie along `OWNERS` before.
    """
    placed, stride = [], 1
    for axis in axes:
        placed.append(replace(axis, stride=stride))
        stride *= axis.degree
    left = max(1, len(devices) // stride)
    inside = min(left, max(1, within // stride)) if within else left
    parts = min(left // inside, owners // within) if owners and within else 1
    for name, degree in ((DATA, inside), (OWNERS, parts), (GROUPS, left // inside // parts)):
        if degree > 1 or name == DATA:
            placed.append(Axis(name=name, degree=degree, stride=stride, samples=True))
            stride *= degree
    return Mesh(devices=devices, axes=tuple(placed))


def copies_along(axis: str) -> str:
    """Return the name of the axis along which neighbours of another axis hold copies of the same slice."""
    return f"copies along {axis}"


def axis_through(devices: Devices, group: Devices) -> Axis:
    """Return the axis along which a group of devices lies: the first two say how far apart they are."""
    stride = devices.index(group[1]) - devices.index(group[0]) if len(group) > 1 else 1
    return Axis(degree=len(group), stride=stride)


@lru_cache(maxsize=256)  # every bucket of a stage asks for the same
def groups_along(devices: Devices, axes: tuple[Axis, ...]) -> tuple[Devices, ...]:
    """Return the groups of devices that differ only in where they lie along some axes, in order."""
    keys = (i - sum(axis.coordinate(i) * axis.stride for axis in axes) for i in range(len(devices)))
    return _grouped(devices, keys)


@lru_cache(maxsize=256)
def groups_apart(
    devices: Devices, axes: tuple[Axis, ...], fastest: Axis | None = None
) -> tuple[Devices, ...]:
    """Return the groups of devices that lie in one place along each of some axes, in order.

    fastest: devices of a group that differ only along this axis follow each other.
    """
    groups = _grouped(
        devices, (tuple(axis.coordinate(position) for axis in axes) for position in range(len(devices)))
    )
    if fastest is None:
        return groups
    along = {device: fastest.coordinate(position) for position, device in enumerate(devices)}
    key = {device: (i - along[device] * fastest.stride, along[device]) for i, device in enumerate(devices)}
    return tuple(tuple(sorted(group, key=key.__getitem__)) for group in groups)


def _grouped(devices: Devices, keys: Iterable[object]) -> tuple[Devices, ...]:
    return tuple(map(tuple, grouped(zip(keys, devices, strict=True)).values()))
