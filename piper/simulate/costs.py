"""The costs of instructions: one small interface over whole units, a roofline or measured times."""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from piper.ir.chunk import Chunk, Kernel, Phase
from piper.ir.devices import Devices
from piper.plan.ops import OPS, Op
from piper.simulate.cluster import Cluster

SLOWED_LIMIT = 0.9  # of a device's speed that communication takes: computing never stands still


# The rows and columns of a product that one processor computes at a time, and how fast, against the largest.
# Smaller tiles read more for each number that they compute.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.92),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.55),
)
SPLITS = (1, 2, 4, 8)  # of the depth, so that the last round is not mostly empty
LEAST_DEPTH = 1024  # of a split
START = 100  # of the depth: a tile takes as long to begin and to end
SHORT = 550  # tokens: attention takes as long to begin and to end, and on the diagonal of a causal one


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """The cost of a communication that has its links to itself: its latency, then its time on the links."""

    latency: float = 0.0
    seconds: float = 0.0
    level: int = 0  # of the network: communications of one device on one level share its bandwidth
    slows: float = 0.0  # the part of its members' speed that it takes from their computing meanwhile
    cores: float = 0.0  # that it occupies for each member, from its beginning to its end
    copies: bool = False  # gradients that lie apart are copied into one buffer before, which is not counted


class Costs(Protocol):
    """The seconds, or units, of every instruction of a plan."""

    @property
    def cores(self) -> int:
        """Return how many cores the devices of a node share. 0: each device computes by itself."""

    @property
    def node(self) -> int:
        """Return how many devices a node has."""

    @property
    def period(self) -> int:
        """Return after how many devices the network repeats itself: groups so far apart cost the same."""

    @property
    def wake(self) -> float:
        """Return the delay of an instruction that waited for another stream, or for a peer."""

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """Return the cost of one phase of a chunk. chunk: None for plans without their outline."""

    def touch(self, op: Op, nbytes: int) -> float:
        """Return the cost of another local instruction, which reads and writes `nbytes` bytes in all.

        For "compute" that of the sums of gradients which a backward reads in addition to its phase.
        """

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """Return the cost of a communication in one group. nbytes: what each member sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Whole units for each phase and nothing for the rest: the clock of schedule tables."""

    forward: int = 1
    inward: int = 1
    weight: int = 1
    cores: int = 0
    node: int = 8
    period: int = 1
    wake: float = 0.0

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """Return the units of a phase. A whole backward costs the sum of its halves."""
        whole = self.inward + self.weight
        return {"F": self.forward, "B": whole, "BI": self.inward, "BW": self.weight}[phase]

    def touch(self, op: Op, nbytes: int) -> float:
        """Return 0: only compute instructions take time."""
        return 0

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """Return a cost of 0: only compute instructions take time."""
        return Talk()


class Roofline:
    """The time of kernels one after another: of their arithmetic or their memory traffic, the longer one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cores, self.node, self.wake = cluster.cores, cluster.devices, 0.0
        self.period = cluster.period
        fast = cluster.attained if cluster.attained_memory is None else cluster.attained_memory
        self.bandwidth = cluster.memory_bandwidth * fast
        self._known: dict[int, tuple[tuple[Kernel, ...], float]] = {}  # by identity: equal layers share them

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """Return the seconds of a phase: the sum over its kernels."""
        assert chunk is not None, "a roofline needs the outline"
        spec = chunk.phases[phase]
        if not spec.kernels and (spec.flops or spec.bytes_moved):  # of a chunk of which only sums are known
            dtype = type_of(chunk)
            return self._seconds(
                (Kernel(kind="product", dtype=dtype, flops=spec.flops, nbytes=spec.bytes_moved),)
            )
        if id(spec.kernels) not in self._known:
            self._known[id(spec.kernels)] = spec.kernels, self._seconds(spec.kernels)
        return self._known[id(spec.kernels)][1]

    def _seconds(self, kernels: tuple[Kernel, ...]) -> float:
        device = sum(kernel.count * self.kernel(kernel) for kernel in kernels)
        host = self.cluster.issue * sum(kernel.count for kernel in kernels)
        return self.cluster.launch + max(device, host)

    def kernel(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel."""
        cluster = self.cluster
        traffic = kernel.nbytes / self.bandwidth
        if kernel.kind == "traffic":
            return cluster.kernel + traffic
        peak = cluster.peak(kernel.dtype)
        if kernel.kind == "product":
            arithmetic = product_seconds(
                kernel.flops, kernel.shape, peak * cluster.attained, cluster.processors
            )
        else:
            part = cluster.attained if cluster.attained_attention is None else cluster.attained_attention
            arithmetic = attention_seconds(kernel.flops, kernel.shape, peak * part, cluster.processors)
        return cluster.kernel + max(arithmetic, traffic)

    def touch(self, op: Op, nbytes: int) -> float:
        """Return the seconds to move these bytes through memory once, or from the device to its host."""
        if op == "compute":  # a kernel that runs in any case moves them too
            return nbytes / self.bandwidth
        if OPS[op].host and (copying := self.cluster.host_seconds(op, nbytes)) is not None:
            return self.cluster.launch + copying
        return self.cluster.launch + self.cluster.kernel + nbytes / self.bandwidth

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """Return the cost of a communication on the levels of the network that its group spans."""
        cluster = self.cluster
        level = cluster.level(devices)
        seconds = nbytes / cluster.bandwidth(op, devices)
        slows = cluster.links[level].slows
        if op == "reduce_scatter" and seconds:
            # Gradients are copied into one buffer before, which takes the device's time.
            whole = nbytes * len(devices) / max(1, len(devices) - 1)  # of which each sends all but its shard
            slows = min(SLOWED_LIMIT, slows + 2 * whole / self.bandwidth / seconds)
        return Talk(
            latency=cluster.launch + cluster.latency(op, devices),
            seconds=seconds,
            level=level,
            slows=slows,
            cores=cluster.links[level].cores,
            copies=op == "reduce_scatter" and cluster.cores > 0,  # those who compute share cores, not devices
        )


def type_of(chunk: Chunk) -> str:
    """Return the type that a chunk computes in: that of the first floating-point value it writes or reads."""
    for spec in (*chunk.outputs, *chunk.saved, *chunk.input_specs):
        if "float" in spec.dtype:
            return spec.dtype
    return "float32"


def product_seconds(flops: float, shape: tuple[int, ...], speed: float, processors: int) -> float:
    """Return the seconds of the arithmetic of a product, with the tiles that are best for it.

    shape: how many products, their rows, columns and depth. Empty: not known, and taken as even.
    speed: the FLOP/s of all processors together, for large and deep products.
    Every processor computes one tile after another. In the last round some have nothing to do.
    """
    if not processors or not shape:
        return flops / speed
    many, rows, columns, depth = shape
    best = float("inf")
    for high, wide, fraction in TILES:
        tiles = many * ceil(rows / high) * ceil(columns / wide)
        work = 2 * high * wide / fraction
        for split in SPLITS:
            if split > 1 and depth < split * LEAST_DEPTH:
                break
            best = min(best, ceil(tiles * split / processors) * work * (depth / split + START))
    return best * processors / speed


def attention_seconds(flops: float, shape: tuple[int, ...], speed: float, processors: int) -> float:
    """Return the seconds of the arithmetic of attention, which is less efficient for short sequences.

    shape: how many heads in all, queries, keys, and the width of a head. Empty: not known.
    """
    if not processors or not shape:
        return flops / speed
    return flops * (1 + SHORT / shape[2]) / speed
