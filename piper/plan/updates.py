"""The parameters in a bucket, and who updates which elements of it, and so of the optimizer's state."""

import math
from dataclasses import dataclass

from piper.ir.devices import Devices
from piper.ir.grouping import grouped
from piper.ir.sharding import Sharding

Share = tuple[tuple[int, ...], int]  # a device's slices of the parameters, and the number of its shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One parameter inside a bucket, as a device holds it."""

    name: str
    shape: tuple[int, ...]
    offset: int  # in elements, from the start of the bucket
    shardings: tuple[Sharding, ...] = ()  # how the devices of the bucket shard it, before ZeRO

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Who updates which elements, whatever they are: equal for the buckets of equal layers."""

    devices: Devices
    groups: tuple[Devices, ...]
    sharded: bool = False
    shardings: tuple[Sharding, ...] = ()

    def shares(self) -> dict[int, Share]:
        """Return what each device updates: its slices of the parameters, and the number of its shard."""
        position = {device: i for i, device in enumerate(self.devices)}
        shares: dict[int, Share] = {}
        for group in self.groups:
            cut = tuple(sharding.index(position[group[0]]) for sharding in self.shardings)
            shares |= {device: (cut, rank if self.sharded else 0) for rank, device in enumerate(group)}
        return shares

    def owners(self) -> dict[Share, list[int]]:
        """Return the devices that update the same elements, by these."""
        return grouped((share, device) for device, share in self.shares().items())
