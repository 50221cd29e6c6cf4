"""The layout of a region's devices: groups that share samples and, in a group, a position along each axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from piper.ir.chunk import ParameterSlice
from piper.ir.devices import Devices
from piper.ir.sharding import Sharding

Lanes = tuple[tuple[int, int, int], ...]
# ^ for each axis: how far apart the devices of a group lie, how many they are, and what each place along the
# axis adds to the number of a device's lane


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGrid:
    """The devices of a region, and the axes along which groups of neighbours divide its work."""

    devices: Devices
    axes: tuple[tuple[str, int], ...] = ()  # with the devices along each, the innermost first

    @property
    def degree(self) -> int:
        """Return the number of neighbours that share their samples."""
        return math.prod(degree for _, degree in self.axes)

    @property
    def slices(self) -> int:
        """Return into how many slices the samples are cut."""
        return len(self.devices) // self.degree

    @property
    def strides(self) -> dict[str, int]:
        """Return the distance between the devices of a group, for each axis."""
        found, stride = {}, 1
        for axis, degree in self.axes:
            found[axis] = stride
            stride *= degree
        return found

    @property
    def lanes(self) -> Lanes:
        """Return the axes, each place counted as it is in the number of a device within its neighbours."""
        strides = self.strides
        return tuple((strides[axis], degree, strides[axis]) for axis, degree in self.axes)

    def lanes_of(self, producer: "RegionGrid", axes: frozenset[str]) -> Lanes:
        """Return the lanes that these devices have in the numbering of a producer, along some of its axes."""
        here, there = self.strides, producer.strides
        return tuple((here[axis], degree, there[axis]) for axis, degree in producer.axes if axis in axes)

    def passes(self, other: "RegionGrid", axis: tuple[str, int]) -> bool:
        """Return whether a value may pass to another region divided along an axis, place by place.

        Capture makes a value whole where it leaves the regions that divide it, or their number of devices.
        """
        return axis in other.axes and len(self.devices) == len(other.devices)


def lane_of(position: int, lanes: Lanes) -> int:
    """Return the number of the lane of a device, from its position in its set."""
    return sum(position // stride % degree * worth for stride, degree, worth in lanes)


@lru_cache(maxsize=256)  # every bucket of a stage asks for the same
def groups_by(devices: Devices, apart: tuple[tuple[int, int], ...]) -> tuple[Devices, ...]:
    """Return the groups of devices with the same position along some axes, each a stride and a degree."""
    if not apart:
        return (devices,)
    found: dict[tuple[int, ...], list[int]] = {}
    for position, device in enumerate(devices):
        place = tuple(position // stride % degree for stride, degree in apart)
        found.setdefault(place, []).append(device)
    return tuple(map(tuple, found.values()))


def groups_along(grid: RegionGrid, stride: int, degree: int) -> tuple[Devices, ...]:
    """Return the groups of devices that differ only in their position along one axis, in order."""
    found: dict[int, list[int]] = {}
    for position, device in enumerate(grid.devices):
        found.setdefault(position - position // stride % degree * stride, []).append(device)
    return tuple(map(tuple, found.values()))


def cuts_of(grid: RegionGrid, slices: Sequence[ParameterSlice]) -> tuple[Sharding, ...]:
    """Return how the devices of a region divide a parameter or a field, the first division first."""
    strides, degrees = grid.strides, dict(grid.axes)
    return tuple(
        Sharding(
            dim=held.dim,
            blocks=held.blocks,
            zigzag=held.zigzag,
            ways=degrees[held.axis],
            stride=strides[held.axis],
        )
        for held in slices
        if held.dim is not None and held.axis in degrees
    )


def in_any_order(shardings: Sequence[Sharding]) -> tuple[Sharding, ...]:
    """Return divisions in a canonical order. The order matters only within one dimension."""
    return tuple(sorted(shardings, key=lambda held: held.dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How the devices of a region hold a parameter, before ZeRO, and which gradients are summed."""

    shardings: tuple[Sharding, ...]
    own: Lanes  # axes along which each place has the whole gradient of what it holds
    summed: Lanes  # axes along which each place has a term of it
    shared: int  # neighbours that share their samples
    experts: int  # over how many slices of the samples the experts are divided

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Return the strides and degrees that tell the groups that add up apart."""
        found = tuple((stride, degree) for stride, degree, _ in self.own)
        return (*found, (self.shared, self.experts)) if self.experts > 1 else found

    @property
    def slices(self) -> int:
        """Return into how many different slices the parameter is divided."""
        return math.prod(held.ways for held in self.shardings)


@lru_cache(maxsize=1024)  # many parameters of a region are divided alike
def holding(grid: RegionGrid, slices: tuple[ParameterSlice, ...], experts: Sharding) -> Holding:
    """Return how a region holds a parameter that is divided into slices.

    experts: how the directives divide it by expert.
    """
    summed = {held.axis for held in slices if held.summed and held.dim is None}
    lanes = dict(zip((axis for axis, _ in grid.axes), grid.lanes, strict=True))
    shardings = list(cuts_of(grid, slices))
    if experts.ways > 1:
        shardings.append(Sharding(dim=experts.dim, ways=experts.ways, stride=grid.degree))
    return Holding(
        shardings=in_any_order(shardings),
        own=tuple(lane for axis, lane in lanes.items() if axis not in summed),
        summed=tuple(lane for axis, lane in lanes.items() if axis in summed),
        shared=grid.degree,
        experts=experts.ways,
    )
