"""Plans: when each device does what, on which stream, in which slot. Pure data that a runtime executes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from piper.ir.averaging import Averaging
from piper.ir.chunk_options import Protection
from piper.ir.devices import Devices, show
from piper.ir.ids import SlotId, Tags
from piper.ir.sharding import UNSHARDED, Sharding
from piper.ir.step_sums import OWN, USUAL
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Op

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

    def group_of(self, device: int, op: Op | None = None) -> Devices:
        """Return the group of a device. op: says of two pairs if that in which it sends or receives."""
        ends = {"send": slice(0, 1), "recv": slice(1, 2)}.get(op or "", slice(None))
        return next(group for group in self.groups if device in group[ends])


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

    @property
    def signallers(self) -> dict[int, int]:
        """Return the place of the instruction that signals each event."""
        return {ins.signals: place for place, ins in enumerate(self.instrs) if ins.signals is not None}

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
    sums: Mapping[str, int] = field(default_factory=lambda: USUAL)  # of a step: how many numbers each has
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

    @property
    def groups_apart(self) -> tuple[Devices, ...]:
        """Return the groups of devices that train apart: one of all devices where none do."""
        return (self.devices,) if self.averaging is None else self.averaging.groups

    @property
    def places(self) -> dict[str, slice]:
        """Return where the numbers of each sum lie in the total of a step."""
        ends = accumulate(self.sums.values())
        return {name: slice(end - self.sums[name], end) for name, end in zip(self.sums, ends, strict=True)}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that directives add: each is a sum of a step, and its weight."""
        return tuple(name for name in self.sums if name not in OWN)

    @property
    def cloned(self) -> dict[str, Bucket]:
        """Return a bucket of each chunk whose experts can be cloned."""
        cloned: dict[str, Bucket] = {}
        for bucket in self.buckets.values():
            for chunk in bucket.chunks if bucket.clones else ():
                cloned.setdefault(chunk, bucket)
        return cloned

    def with_instrs(self, change: Callable[[Instr], Instr]) -> "Plans":
        """Return the plans with each instruction changed."""
        plans = (replace(plan, instrs=tuple(map(change, plan.instrs))) for plan in self.plans)
        return replace(self, plans=tuple(plans))

    def buckets_on(self, device: int) -> list[Bucket]:
        """Return the buckets that a device holds."""
        return [bucket for bucket in self.buckets.values() if device in bucket.devices]

    def lie_in(self, other: "Plans") -> bool:
        """Return whether all buckets lie in the memory of those that other plans have."""
        theirs = other.buckets
        return all(name in theirs and bucket.lies_as(theirs[name]) for name, bucket in self.buckets.items())

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
