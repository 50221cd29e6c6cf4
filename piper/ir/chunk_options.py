"""What directives decide for a chunk: one record, which each of them replaces and everything later reads."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from piper.ir.devices import Devices
from piper.ir.grouping import grouped
from piper.ir.ids import Tags
from piper.ir.mesh import EXPERTS, Axis, Mesh, mesh_of
from piper.ir.sharding import AxisPlacement, Shard

Apart = Literal["machine", "device"]
APART: tuple[Apart, ...] = get_args(Apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPolicy:
    """An axis along which a chunk is sharded, as its directive asks."""

    axis: str
    degree: int
    stream: str  # of its collectives
    origin: int  # the directive that said so
    weights: Mapping[str, int] = field(default_factory=dict)  # by patterns of parameters: the dimension
    fields: Mapping[str, Shard] = field(default_factory=dict)  # of the batch: those that it shards, and how
    between: int | None = None  # the dimension along which it shards what travels between regions
    attention: str = "gather"
    zigzag: bool = False  # each device has an early and a late slice of a sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a chunk's parameters live on its devices."""

    zero: int = 0  # 1: optimizer state is sharded, 2: gradients too, 3: parameters too
    within: int | None = None  # sharded inside groups of so many neighbouring devices. None: over all of them
    optimizer_within: int | None = None  # and the optimizer's state inside groups of so many. None: in these
    bucket_mb: float | None = None
    reduce: str = "fp32"  # the type gradients travel in between replicas: "fp32" or "bf16"
    keep: bool = False  # what is gathered, and whole gradients, stay for the step and not for one use
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    ways: int = 1  # the degree of the axis along which experts are sharded
    by_expert: Mapping[str, AxisPlacement] = field(default_factory=dict)  # of parameters and buffers
    clones: int = 0  # experts of other devices of its group of which each device has room for a copy
    capacity: float | None = None  # room for rows from each device, in even shares. None: what is counted
    own_rows: tuple[str, ...] = ()  # axes along which each device routes rows of its own
    exchange_stream: str = "exchange"
    axes: tuple[AxisPolicy, ...] = ()  # the innermost groups first
    origin: int | None = None  # the directive that said so

    @property
    def inner(self) -> int:
        """Return the number of neighbouring devices that hold different slices before ZeRO shards them."""
        return self.degree * self.outer_ways

    @property
    def outer_ways(self) -> int:
        """Return over how many groups of devices with the same samples experts are sharded."""
        return self.ways // math.gcd(self.ways, math.prod(held.degree for held in self._own_axes))

    @property
    def _own_axes(self) -> list[AxisPolicy]:
        return [held for held in self.axes if held.axis in self.own_rows]

    @property
    def splits_experts(self) -> bool:
        """Return whether experts can be sharded over neighbours: along axes with own rows that lie together.

        Groups begin with the first such axis. They end within one, at the end of one, or beyond all axes.
        """
        end = 1
        for held in self.axes if self._own_axes else ():
            if end > 1 or held.axis in self.own_rows:
                if held.axis not in self.own_rows:
                    return False
                end *= held.degree
                if end % self.ways == 0:
                    return True
                if self.ways % end:
                    return False
        return True

    @property
    def degree(self) -> int:
        """Return the number of devices that share the same samples."""
        return math.prod(held.degree for held in self.axes) if self.axes else 1

    def mesh(self, devices: Devices) -> Mesh:
        """Return how a chunk's devices are arranged: along its axes, then by expert, by sample, by group."""
        axes = [Axis(name=held.axis, degree=held.degree) for held in self.axes]
        if self.outer_ways > 1:
            axes.append(Axis(name=EXPERTS, degree=self.outer_ways, samples=True))
        mesh = mesh_of(devices, axes, self.within, self.optimizer_within)
        if self.ways == 1:
            return mesh
        stride = next((mesh.axis(held.axis).stride for held in self._own_axes), self.degree)
        return replace(mesh, experts=Axis(name=EXPERTS, degree=self.ways, stride=stride, samples=True))

    @property
    def may_overflow(self) -> bool:
        """Return whether more rows than there is room for may go from one device to another."""
        return self.capacity is not None and self.capacity < self.ways

    def field_placements(self, name: str) -> tuple[AxisPlacement, ...]:
        """Return how a field of the batch is sharded beyond its samples. Empty: it is not."""
        return tuple(
            AxisPlacement(axis=held.axis, degree=held.degree, placement=held.fields[name])
            for held in self.axes
            if name in held.fields
        )

    def placements(self, name: str) -> tuple[AxisPlacement, ...]:
        """Return how a parameter or a buffer is sharded by expert. Empty: it is not."""
        return (self.by_expert[name],) if name in self.by_expert else ()


NO_POLICY = Policy()


def block_rows(rows: int, ways: int, capacity: float | None) -> int:
    """Return the rows of a block that each of `ways` devices sends to each. 0: blocks have no fixed size."""
    return 0 if capacity is None or ways == 1 else min(rows, math.ceil(rows * capacity / ways))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How many copies of the state are kept beyond the first, how far apart, and after how many steps."""

    copies: int = 0
    apart: Apart = "machine"
    every: int = 1
    devices_per_machine: int | None = None  # neighbouring devices share a machine. None: all devices do

    def machine(self, device: int) -> int:
        """Return the number of the machine that a device is part of."""
        return 0 if self.devices_per_machine is None else device // self.devices_per_machine

    def domain(self, device: int) -> int:
        """Return what a device is lost together with: its machine, or itself alone."""
        return device if self.apart == "device" else self.machine(device)

    def domains(self, devices: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return the devices that are lost together, by machine or one by one."""
        members_by_domain = grouped((self.domain(device), device) for device in sorted(devices))
        return {domain: tuple(members) for domain, members in members_by_domain.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopies:
    """How a chunk's state is protected, on which stream it is copied, and the directive that says so."""

    protection: Protection  # the same for all chunks
    stream: str
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopies:
    """How a chunk's values are kept in memory of the host, and the directive that says so."""

    stream: str
    least: int  # bytes: smaller values stay
    ahead: int  # compute nodes that each copy may take
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeOptions:
    """The options that the code of a chunk depends on. Other strategies with the same ones use its code."""

    ways: int = 1  # over how many devices its experts are sharded
    clones: int = 0  # experts of other devices that each computes in addition to its own
    capacity: float | None = None  # room for rows from each device, in even shares. None: what is counted
    budget: float | None = None  # the share of activations that it may save. None: all of them
    products: str | None = None  # the precision of its products. None: the job's
    flat: bool = False  # its compiled backward writes gradients into given memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """All that directives decide for a chunk, except on which devices its nodes run and in which order."""

    policy: Policy = NO_POLICY
    part_policies: Mapping[Tags, Policy] = field(default_factory=dict)  # asked for on some microbatches
    transfer_stream: str | None = None
    budget: float | None = None  # the share of activations that it may save. None: all of them
    rerun: str | None = None  # its region whose forwards are recomputed
    products: str | None = None  # the precision of its products. None: the job's
    gather: str | None = None  # the precision in which its sharded weights are gathered. None: the job's
    protect: StateCopies | None = None
    offload: HostCopies | None = None  # of its activations
    offload_state: HostCopies | None = None  # of the optimizer's state for its parameters
