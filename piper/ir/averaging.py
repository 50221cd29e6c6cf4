"""Groups of devices that train apart, each a copy of the whole job, and average their parameters."""

from dataclasses import dataclass
from functools import cached_property

from piper.ir.devices import Devices, columns


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The groups that train apart, and in which steps they average. Groups differ only in their samples."""

    groups: tuple[Devices, ...]  # the i-th device of each holds the same part of the model
    every: int = 1  # steps from one average to the next
    stream: str = "average"

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return the group of each device, and its place there."""
        return {d: (g, i) for g, devices in enumerate(self.groups) for i, d in enumerate(devices)}

    @property
    def peers(self) -> tuple[Devices, ...]:
        """Return the devices that hold the same part of the model, one of each group."""
        return columns(self.groups)

    def everywhere(self, devices: Devices) -> Devices:
        """Return devices of the first group, then their counterparts in each of the others."""
        places = [self.places[device][1] for device in devices]
        return tuple(group[place] for group in self.groups for place in places)

    def copies(self, several: tuple[Devices, ...]) -> tuple[Devices, ...]:
        """Return sets of devices of the first group, then their counterparts in each of the others."""
        places = [[self.places[device][1] for device in devices] for devices in several]
        return tuple(tuple(group[i] for i in each) for group in self.groups for each in places)

    def first(self, devices: Devices) -> Devices:
        """Return those of some devices that are in the first group."""
        return tuple(device for device in devices if self.places[device][0] == 0)

    def due(self, step: int) -> bool:
        """Return whether groups average at the end of a step. step: how many steps came before."""
        return (step + 1) % self.every == 0
