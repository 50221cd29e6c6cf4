"""What each device updates of a bucket: which elements of its parameters, and so of the optimizer's state."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from piper.ir.devices import Devices
from piper.ir.sharding import Sharding, whole_sizes

PartT = TypeVar("PartT", bound=Hashable)
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


class FlatShards:
    """Parameters one after another, cut in shards of which each member of a group has one, where zero > 0."""

    __slots__ = ()
    groups: tuple[Devices, ...]
    zero: int
    bounds: tuple[int, ...]  # where each shard begins, and the end, in elements. Empty: equal shards
    pieces: tuple[Piece, ...]

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @property
    def own_numel(self) -> int:
        """Return the elements of its parameters, without copies of those of other devices."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def padded(self) -> int:
        """Return the elements of the flat bucket, padded to divide evenly among its group."""
        if self.bounds:
            return self.own_numel
        return -(-self.own_numel // self.group_size) * self.group_size

    @property
    def shards(self) -> tuple[int, ...]:
        """Return where the shard of each member of a group begins, and the end. Empty: they are equal."""
        return self.bounds

    def rank(self, device: int) -> int:
        """Return the place of a device in its group."""
        return next(group for group in self.groups if device in group).index(device)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return where the shard of a member of a group begins and ends in the flat bucket."""
        if shards := self.shards:
            return shards[rank], shards[rank + 1]
        length = self.padded // self.group_size
        return rank * length, (rank + 1) * length

    def owned(self, device: int) -> tuple[int, int]:
        """Return where the shard of a device begins and ends in the flat bucket. Without ZeRO it is all."""
        return self.shard(self.rank(device)) if self.zero else (0, self.own_numel)

    def owner(self, piece: Piece) -> int:
        """Return the member of a group whose shard a parameter begins in."""
        return next(rank for rank in range(self.group_size) if piece.offset < self.shard(rank)[1])

    def pieces_in(self, low: int, high: int) -> Iterator[tuple[Piece, int, int]]:
        """Yield the parameters that lie between two elements, each with where that begins and ends."""
        for piece in self.pieces:
            start, stop = max(piece.offset, low), min(piece.offset + piece.numel, high)
            if start < stop:
                yield piece, start, stop


def sharers(shares: Mapping[int, PartT]) -> dict[PartT, list[int]]:
    """Return the devices that have the same part of something, by part, in their order."""
    same: dict[PartT, list[int]] = {}
    for device, part in shares.items():
        same.setdefault(part, []).append(device)
    return same


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
        return sharers(self.shares())


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUpdate(FlatShards):
    """A bucket as its optimizer sees it. `owned`: what a device updates, and has the optimizer's state for.

    Devices that hold slices of parameters update these, or some of the parameters in full: `in_full`.
    """

    name: str
    devices: Devices
    groups: tuple[Devices, ...]  # devices that share the update of their elements, or update the same
    zero: int = 0  # 0: each device updates all that its bucket has
    bounds: tuple[int, ...] = ()
    dtype: str  # of the parameters that chunks compute with
    trainable: bool = True
    pieces: tuple[Piece, ...]

    def in_full(self, slices: tuple[Devices, ...]) -> "BucketUpdate":
        """Return the update of parameters in full, of which the devices of each of these groups have slices.

        Each parameter has an owner among the devices of a group of ZeRO that have slices of it.
        """
        count = len(slices[0])
        having = {device: group for group in slices for device in group}
        first = [group for group in self.groups if having[group[0]][0] == group[0]]
        joint = tuple(tuple(each for device in group for each in having[device]) for group in first)
        pieces = (
            replace(p, shape=whole_sizes(p.shape, p.shardings), offset=p.offset * count, shardings=())
            for p in self.pieces
        )
        return replace(
            self,
            groups=joint if self.zero else slices,
            zero=max(1, self.zero),
            pieces=tuple(pieces),
            bounds=tuple(bound * count for bound in self.bounds),
        )

    @property
    def elements(self) -> int:
        """Return the most elements that a device updates."""
        shards = range(self.group_size) if self.bounds else range(1)
        return max(stop - start for start, stop in map(self.shard, shards)) if self.zero else self.own_numel

    @property
    def ownership(self) -> Ownership:
        """Return who updates which elements."""
        shardings = tuple(sharding for piece in self.pieces for sharding in piece.shardings)
        return Ownership(
            devices=self.devices, groups=self.groups, sharded=bool(self.zero), shardings=shardings
        )

    @property
    def distinct(self) -> tuple[Devices, ...]:
        """Return the devices that update different elements, in a group for each slice of the parameters."""
        firsts = {devices[0]: cut for (cut, _), devices in self.ownership.owners().items()}
        return tuple(map(tuple, sharers(firsts).values()))
