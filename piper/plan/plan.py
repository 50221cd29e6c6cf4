"""Plans: when each device does what, on which stream, in which slot. Pure data that a runtime executes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from piper.ir.averaging import Averaging
from piper.ir.chunk_options import Protection
from piper.ir.devices import Devices, show
from piper.ir.dtypes import MixedPrecision
from piper.ir.ids import SlotId, Tags
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that live, travel and are updated together.

    Replicas reduce within `groups`, then `across` them where groups are replicas of each other. With zero > 0
    each member of a group owns an equal shard of the flat, padded bucket. With `bounds` a shard holds whole
    parameters, for an optimizer that needs them so.
    """

    name: str
    devices: Devices
    groups: tuple[Devices, ...]
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

    def held(self, rank: int) -> tuple[int, int]:
        """Return where the shard of parameters on a member of a group begins and ends: all parts of it."""
        first = rank - rank % self.parts
        return self.shard(first)[0], self.shard(first + self.parts - 1)[1]

    @property
    def ways(self) -> int:
        """Return how many groups hold different slices, or the same slice of which they compute the same."""
        return len(self.groups) // (len(self.across[0]) if self.across else 1)

    def shard(self, rank: int) -> tuple[int, int]:
        """Return where the shard of a member of a group begins and ends in the flat bucket."""
        if self.bounds:
            return self.bounds[rank], self.bounds[rank + 1]
        length = self.padded // self.group_size
        return rank * length, (rank + 1) * length

    def owner(self, piece: Piece) -> int:
        """Return the member of a group whose shard a parameter begins in."""
        return next(rank for rank in range(self.group_size) if piece.offset < self.shard(rank)[1])

    @property
    def largest_held(self) -> int:
        """Return the elements of the largest shard of parameters on a device."""
        return self.largest_shard * self.parts

    @property
    def largest_shard(self) -> int:
        """Return the elements of the largest shard."""
        if not self.bounds:
            return self.padded // self.group_size
        return max(stop - start for start, stop in map(self.shard, range(self.group_size)))

    def slices(self) -> Iterator[tuple[tuple[int, ...], Devices]]:
        """Yield each group, after the slices of parameters that its devices hold."""
        position = {device: i for i, device in enumerate(self.devices)}
        shardings = [held for piece in self.pieces for held in piece.shardings]
        for group in self.groups:
            yield tuple(held.index(position[group[0]]) for held in shardings), group

    @property
    def distinct(self) -> tuple[Devices, ...]:
        """Return one group of devices for each different slice. Together they hold each element once."""
        found: dict[tuple[int, ...], Devices] = {}
        for held, group in self.slices():
            found.setdefault(held, group)
        return tuple(found.values())

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
        return (self.padded if self.zero else self.numel) * self.itemsize

    @property
    def shard_nbytes(self) -> int:
        return self.largest_held * self.itemsize

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
