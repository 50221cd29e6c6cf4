"""Groups of devices that train apart, each a copy of the whole job, and average their parameters."""

from dataclasses import dataclass
from functools import cached_property

from piper.ir.devices import Devices, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """How the parameters of all groups move by the mean of their changes: SGD, as in `torch.optim`."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False


AVERAGE = OuterStep()  # the new parameters are the average


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """The groups that train apart, and in which steps they average. Groups differ only in their samples."""

    every: int = 1  # steps from one average to the next
    stream: str = "average"
    outer: OuterStep = AVERAGE
    fragments: int = 1  # of the parameters, which average in different steps
    overlap: int = 0  # steps during which an average travels, before it is merged
    keep: float = 0.0  # the share of its own parameters that a group keeps when it merges
    groups: tuple[Devices, ...]  # the i-th device of each holds the same part of the model

    @property
    def outer_values(self) -> int:
        """Return how many values the optimizer's state holds for each parameter between two averages."""
        return (self.outer != AVERAGE) + (self.outer.momentum > 0) + (self.overlap > 0)

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
        return tuple(device for copy in self.copies((devices,)) for device in copy)

    def copies(self, several: tuple[Devices, ...]) -> tuple[Devices, ...]:
        """Return sets of devices of the first group, then their counterparts in each of the others."""
        places = [[self.places[device][1] for device in devices] for devices in several]
        return tuple(tuple(group[i] for i in each) for group in self.groups for each in places)

    def first(self, devices: Devices) -> Devices:
        """Return those of some devices that are in the first group."""
        return tuple(device for device in devices if self.places[device][0] == 0)

    def since(self, step: int, fragment: int = 0) -> int | None:
        """Return how many steps ago a fragment was due, after `step` steps before this one. None: never."""
        count = step + 1 - fragment * self.every // self.fragments
        return count % self.every if step + 1 > count % self.every else None

    def due(self, step: int, fragment: int = 0) -> bool:
        """Return whether a fragment is averaged, or begins to be, at the end of a step."""
        return self.since(step, fragment) == 0

    def part_sent(self, step: int, fragment: int = 0) -> int | None:
        """Return which of `overlap` equal parts of a fragment travels during a step. None: none does."""
        since = self.since(step, fragment)
        return since - 1 if since is not None and 1 <= since <= self.overlap else None

    def merges(self, step: int, fragment: int = 0) -> bool:
        """Return whether what has travelled is merged at the end of a step."""
        return self.overlap > 0 and self.since(step, fragment) == self.overlap
