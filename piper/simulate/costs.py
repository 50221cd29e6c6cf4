"""What things cost: one small interface, behind it whole units, a roofline, or measured times."""

from dataclasses import dataclass
from typing import Protocol

from piper.devices import Devices
from piper.ir.chunk import Chunk, Phase
from piper.plan.ops import Op
from piper.simulate.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A communication that has its links to itself: what passes before it uses them, and then how long."""

    latency: float = 0.0
    seconds: float = 0.0
    level: int = 0  # of the network: those on one level of one device share it


class Costs(Protocol):
    """Seconds, or units, of everything a plan does."""

    @property
    def cores(self) -> int:
        """The cores that the devices of a node share; 0: each device computes by itself."""

    @property
    def node(self) -> int:
        """The devices of a node."""

    @property
    def wake(self) -> float:
        """What passes until an instruction starts that waited for another stream, or for a peer."""

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """One phase of a chunk; of plans without their outline nothing is known of the chunk."""

    def touch(self, op: Op, nbytes: int) -> float:
        """What else a device does by itself, over values of so many bytes in all."""

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """A communication within one group, of which each member sends so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole units for each phase and nothing for the rest: the clock of schedule tables."""

    forward: int = 1
    inward: int = 1
    weight: int = 1
    cores: int = 0
    node: int = 8
    wake: float = 0.0

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """The units of a phase; a whole backward is both of its halves."""
        whole = self.inward + self.weight
        return {"F": self.forward, "B": whole, "BI": self.inward, "BW": self.weight}[phase]

    def touch(self, op: Op, nbytes: int) -> float:
        """Nothing."""
        return 0

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """Nothing."""
        return Talk()


class Roofline:
    """The most that a cluster's peaks allow: arithmetic or memory traffic, whichever takes longer."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cores, self.node, self.wake = cluster.cores, cluster.devices, 0.0

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """A phase by its arithmetic and its memory traffic."""
        assert chunk is not None, "a roofline needs the outline"
        spec = chunk.phases[phase]
        arithmetic = spec.flops / self.cluster.peak(type_of(chunk))
        traffic = spec.bytes_moved / self.cluster.memory_bandwidth
        return self.cluster.launch + max(arithmetic, traffic) / self.cluster.attained

    def touch(self, op: Op, nbytes: int) -> float:
        """What goes once over its values."""
        return self.cluster.launch + nbytes / (self.cluster.memory_bandwidth * self.cluster.attained)

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """A communication on the slowest level that its group spans."""
        cluster = self.cluster
        return Talk(
            latency=cluster.launch + cluster.latency(op, devices),
            seconds=nbytes / cluster.bandwidth(op, devices),
            level=cluster.level(devices),
        )


def type_of(chunk: Chunk) -> str:
    """The type that a chunk computes in: that of the first floating value it makes or reads."""
    for spec in (*chunk.outputs, *chunk.saved, *chunk.input_specs):
        if "float" in spec.dtype:
            return spec.dtype
    return "float32"
