"""Plans: when each device does what, on which stream, in which slot. Pure data that a runtime executes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from piper.ir.averaging import Averaging
from piper.ir.chunk_options import Protection
from piper.ir.devices import Devices, show
from piper.ir.dtypes import MixedPrecision
from piper.ir.ids import SlotId, SlotKind, Tags
from piper.ir.sharding import UNSHARDED, Sharding
from piper.plan.instr import Instr

SHOWN = 4  # plans in the text of all plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The bytes of a slot: storage of its own, and storages it shares with other slots."""

    nbytes: int
    shares: tuple[tuple[SlotId, int], ...] = ()  # (storage, bytes): live until all who share it are freed
    dynamic: bool = False  # the size depends on routing; `nbytes` is then the balanced size
    host: int = 0  # bytes in memory of the host
    sharding: Sharding = UNSHARDED  # of what outlives a step: how it is sharded
    placed: Devices = ()  # and, where it is, over which devices

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Return how it is sharded. Empty: every device holds all of it."""
        return (self.sharding,) if self.sharding.degree > 1 else ()

    def position(self, device: int) -> int:
        """Return the position of a device among those that shard it."""
        return self.placed.index(device) if self.placed else 0

    @property
    def everywhere(self) -> int:
        """Return its own bytes, on the device and on the host."""
        return self.nbytes + self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """A communicator: groups of devices that communicate among themselves, or (sender, receiver) pairs."""

    name: str
    kind: str  # "pairs" or "groups"
    groups: tuple[Devices, ...]


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


Extent = Literal["whole", "held", "owned"]
# ^ of a bucket on a device: all of it, the shard of parameters that it holds between uses, what it updates


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCollective:
    """A collective in groups of a bucket's devices: which elements each member gives, and which it gets."""

    groups: tuple[Devices, ...]
    gives: Extent
    gets: Extent
    among: str = ""  # in words, where it is not among replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that live, travel and are updated together, and which devices hold, sum and update what.

    With zero > 0 each member of a group owns an equal shard of the flat, padded bucket. With `bounds` a shard
    holds whole parameters, for an optimizer that needs them so. `reductions`, `gather_for_use` and
    `gather_updated` say which devices communicate; `owned` and `held` what each has.
    """

    name: str
    devices: Devices
    groups: tuple[Devices, ...]  # devices that share the update of their elements, or update the same
    chunks: tuple[str, ...]  # the chunks that read it
    dtype: str
    itemsize: int
    zero: int = 0
    trainable: bool = True
    copies: int = 1  # how many devices hold each element of the gradient that is clipped and applied
    siblings: tuple[str, ...] = ()  # the other buckets of a tied parameter
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    reduced_as: str = ""  # the type its gradients travel in between replicas; empty: that of their sum
    keep: bool = False  # its gathered parameters and whole gradients stay until their last use in the step
    gathered_as: str = ""  # "fp8": rounded row by row when its shards are gathered; empty: as it is
    origin: tuple[int, ...] = ()  # the directives that made it so
    inside: tuple[Devices, ...] = ()  # groups that gather parameters, where `groups` share only their updates
    across: tuple[Devices, ...] = ()  # devices of different groups that sum their shards: replicas of groups
    bounds: tuple[int, ...] = ()  # where each shard begins, and the end, in elements. Empty: equal shards
    pieces: tuple[Piece, ...]

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    @property
    def parts(self) -> int:
        """Return into how many parts, with an owner each, the shard of parameters on a device is cut."""
        return self.group_size // len(self.inside[0]) if self.inside else 1

    @property
    def owners(self) -> tuple[Devices, ...]:
        """Return the devices that hold the same shard of parameters and update a part of it each."""
        starts = range(0, self.group_size, self.parts)
        return tuple(group[start : start + self.parts] for group in self.groups for start in starts)

    @property
    def reductions(self) -> tuple[ShardCollective, ...]:
        """Return how gradients become what each device applies: a first sum after each run of backwards.

        The others follow the last run of a step.
        """
        if self.group_size == 1:
            return ()
        if not self.zero:
            return (ShardCollective(groups=self.groups, gives="whole", gets="whole"),)
        shard: Extent = "held" if self.inside else "owned"
        steps = [ShardCollective(groups=self.inside or self.groups, gives="whole", gets=shard)]
        if self.inside:
            steps.append(ShardCollective(groups=self.owners, gives="held", gets="owned", among="over owners"))
        if self.across:
            steps.append(
                ShardCollective(groups=self.across, gives="owned", gets="owned", among="across groups")
            )
        return tuple(steps)

    @property
    def gather_for_use(self) -> ShardCollective | None:
        """Return which devices gather parameters before chunks read them. None: every device has them."""
        if self.zero < 3:
            return None
        return ShardCollective(groups=self.inside or self.groups, gives="held", gets="whole")

    @property
    def gather_updated(self) -> ShardCollective | None:
        """Return which devices gather what each has updated. None: a device updates all that it holds."""
        if self.inside:
            return ShardCollective(groups=self.owners, gives="owned", gets="held", among="over owners")
        return ShardCollective(groups=self.groups, gives="owned", gets="whole") if 0 < self.zero < 3 else None

    def gradient(self, extent: Extent = "owned") -> SlotId:
        """Return the slot of its gradient on a device: the sum that an update applies, or one before it."""
        kinds: Mapping[Extent, SlotKind] = {
            "whole": "grad",
            "held": "grad_inside",
            "owned": "grad_shard" if self.zero else "grad",
        }
        return SlotId(kinds[extent], self.name)

    def elements(self, extent: Extent = "owned") -> int:
        """Return the most elements that a device has: all, the shard that it holds, or what it updates."""
        if not self.zero or extent == "whole":
            return self.padded if self.zero else self.numel
        longest = max(b - a for a, b in pairwise(self.bounds)) if self.bounds else self.shard(0)[1]
        return longest * self.parts if extent == "held" else longest

    def rank(self, device: int) -> int:
        """Return the place of a device in its group."""
        return next(group for group in self.groups if device in group).index(device)

    def owned(self, device: int) -> tuple[int, int]:
        """Return where what a device updates begins and ends in the flat bucket."""
        return self.shard(self.rank(device)) if self.zero else (0, self.numel)

    def held(self, device: int) -> tuple[int, int]:
        """Return where what a device holds of the parameters between uses begins and ends."""
        if self.zero < 3:
            return 0, self.elements("whole")
        return self.gathered(self.rank(device) // self.parts)

    def gathered(self, rank: int) -> tuple[int, int]:
        """Return where the shard that a member of a group gives to `gather_for_use` begins and ends."""
        return self.shard(rank * self.parts)[0], self.shard((rank + 1) * self.parts - 1)[1]

    def shard(self, rank: int) -> tuple[int, int]:
        """Return where the shard that a member of a group updates begins and ends in the flat bucket."""
        if self.bounds:
            return self.bounds[rank], self.bounds[rank + 1]
        length = self.padded // self.group_size
        return rank * length, (rank + 1) * length

    def owner(self, piece: Piece) -> int:
        """Return the member of a group whose shard a parameter begins in."""
        return next(rank for rank in range(self.group_size) if piece.offset < self.shard(rank)[1])

    @property
    def ways(self) -> int:
        """Return how many groups hold different slices, or the same slice of which they compute the same."""
        return len(self.groups) // (len(self.across[0]) if self.across else 1)

    def shares(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return what each device updates: its slices of the parameters, and the number of its shard."""
        position = {device: i for i, device in enumerate(self.devices)}
        shardings = [held for piece in self.pieces for held in piece.shardings]
        shares: dict[int, tuple[tuple[int, ...], int]] = {}
        for group in self.groups:
            cut = tuple(held.index(position[group[0]]) for held in shardings)
            shares |= {device: (cut, rank if self.zero else 0) for rank, device in enumerate(group)}
        return shares

    @property
    def distinct(self) -> tuple[Devices, ...]:
        """Return the devices that update different elements, in a group for each slice of the parameters."""
        by_share: dict[tuple[tuple[int, ...], int], int] = {}
        for device, share in self.shares().items():
            by_share.setdefault(share, device)
        groups: dict[tuple[int, ...], list[int]] = {}
        for (cut, _), device in by_share.items():
            groups.setdefault(cut, []).append(device)
        return tuple(map(tuple, groups.values()))

    def family(self, buckets: "Mapping[str, Bucket]") -> "list[Bucket]":
        """Return all buckets of a tied parameter, this one first."""
        return [self, *(buckets[name] for name in self.siblings)]

    @property
    def travels(self) -> bool:
        """Return whether this bucket's gradient is summed over devices, for which it must be contiguous."""
        return self.group_size > 1 or bool(self.siblings)

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def padded(self) -> int:
        """Return the elements of the flat bucket, padded to divide evenly among its group."""
        if self.bounds:
            return self.numel
        return -(-self.numel // self.group_size) * self.group_size

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole bucket, as a device holds it when gathered."""
        return self.elements("whole") * self.itemsize

    @property
    def precision(self) -> MixedPrecision:
        """Return the types of its parameters, of their gradients and of their master copies."""
        return MixedPrecision(dtype=self.dtype, reduced_as=self.reduced_as, gathered_as=self.gathered_as)

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer trains a copy of its parameters in a longer type."""
        return self.trainable and self.precision.has_master


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The instructions of `devices` in a step. The devices differ only in rank."""

    devices: Devices
    instrs: tuple[Instr, ...]
    slots: Mapping[SlotId, Slot]  # those made and freed within the step
    residents: Mapping[SlotId, Slot]  # those that outlive it: parameters, optimizer state, buffers, constants

    def __repr__(self) -> str:
        return f"Plan(devices {show(self.devices)}, {len(self.instrs)} instructions)"

    @property
    def buffers(self) -> dict[str, Slot]:
        """Return the slots of buffers, by name."""
        return {slot.owner: held for slot, held in self.residents.items() if slot.kind == "buffer"}

    def around(self, position: int, reach: int = 3) -> str:
        """Return text of the instructions near a position, with an arrow at it."""
        low, high = max(0, position - reach), position + reach + 1
        return "\n".join(
            f"{'-->' if i == position else '   '} {i:5}  {ins.op:14} {ins.node}"
            for i, ins in enumerate(self.instrs[low:high], low)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChunk:
    """A chunk of the model: its annotations, and its devices in the order that they share the samples."""

    tags: Tags
    devices: Devices
    elsewhere: Mapping[Tags, Devices] = field(default_factory=dict)  # of some microbatches

    def devices_for(self, part: Tags) -> Devices:
        """Return the devices that run a microbatch."""
        return self.elsewhere.get(part, self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The plans of all devices, and what they share."""

    plans: tuple[Plan, ...]
    comms: Mapping[str, Comm]
    buckets: Mapping[str, Bucket]
    seed: float  # the gradient of each microbatch's loss
    weighted: bool  # gradients are divided by the total weight in the update
    cells: int = 1  # slices of the samples before microbatches; every set of devices divides it
    axes: Mapping[str, int] = field(default_factory=dict)  # the number of microbatches along each axis
    copies: int = 1  # how many devices hold the loss of each slice
    chunks: Mapping[str, PlacedChunk] = field(default_factory=dict)
    protection: Protection | None = None  # how copies of the state are kept. None: by no instruction
    averaging: Averaging | None = None  # the groups that train apart. None: all devices train together
    why: tuple[str, ...] = ()  # the options that the compiler rejected, with the reasons

    def __repr__(self) -> str:
        shown = [*map(repr, self.plans[:SHOWN]), *(["..."] if len(self) > SHOWN else [])]
        return f"Plans({len(self.devices)} devices: {', '.join(shown)})"

    @property
    def devices(self) -> Devices:
        """Return every device of the job, in order."""
        return tuple(sorted(device for plan in self.plans for device in plan.devices))

    def place_in_group(self, device: int) -> tuple[int, int]:
        """Return which of the groups that train apart a device is in, and its counterpart in the first."""
        if self.averaging is None:
            return 0, device
        group, place = self.averaging.places[device]
        return group, self.averaging.groups[0][place]

    def of(self, device: int) -> Plan:
        """Return the plan of one device."""
        for plan in self.plans:
            if device in plan.devices:
                return plan
        raise KeyError(device)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)
