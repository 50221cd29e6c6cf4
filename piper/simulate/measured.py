"""Measured costs: the times of chunks and communication from a profile, in a file of their own.

Costs that were not measured are estimated from those that were: the halves of a backward from the whole, a
chunk of another size from its arithmetic and traffic, a communication from those of other kinds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from piper.errors import CONTENT, ConfigError, file_errors
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.devices import Devices
from piper.ir.grouping import grouped
from piper.ir.json_fields import from_json, to_json
from piper.plan.ops import OPS, Op
from piper.plan.plan import Plans
from piper.process.files import write_output
from piper.simulate.account import communicators_of
from piper.simulate.cluster import Cluster, load_cluster
from piper.simulate.costs import Costs, Roofline, Talk
from piper.simulate.profile import fingerprint
from piper.version import VERSION

FORM = 1  # of the file
HALVES: tuple[Phase, ...] = ("BI", "BW")
HINT = "make it again: piper profile DIR --calibrate FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds as a function of size. Base and slope are at least 0."""

    base: float = field(metadata={"key": "base_s"})
    slope: float = field(metadata={"key": "per_byte_s"})

    def at(self, size: float) -> float:
        """Return the seconds of a size."""
        return self.base + self.slope * size


NOTHING = Line(base=0.0, slope=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds from a profile."""

    model: str  # what `fingerprint` says of the model
    source: str  # where they were measured
    chunks: Mapping[str, Mapping[str, float]]  # by a chunk's key, then by phase
    arithmetic: float = field(metadata={"key": "per_flop_s"})  # of chunks that were not measured
    traffic: float = field(metadata={"key": "per_byte_s"})
    sizes: Mapping[str, Mapping[str, Line]] = field(default_factory=dict)  # by a chunk's name, then by phase:
    # seconds by arithmetic and bytes together, of chunks that were measured at several microbatch sizes
    touches: Mapping[str, Line] = field(default_factory=dict)  # by op; "": those that were not measured
    talks: Mapping[str, Line] = field(default_factory=dict)  # likewise
    late: Mapping[str, float] = field(default_factory=dict, metadata={"key": "late_s"})
    # ^ by op: until a communication starts that could
    gap: float = field(default=0.0, metadata={"key": "gap_s"})
    # ^ between an instruction and the next one of its stream
    wake: float = field(default=0.0, metadata={"key": "wake_s"})
    # ^ until an instruction starts that waited for another stream, or for a peer
    cores: int = 0
    node: int = 8
    period: int = 1

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        """Return the seconds of a phase as measured, or estimated from phases that were measured."""
        assert chunk is not None, "measured costs need the outline"
        lines = self.sizes.get(chunk.name, {})  # at another size than those that were measured
        found: dict[str, float] = {
            p: lines[p].at(s.flops + s.bytes_moved) for p, s in chunk.phases.items() if p in lines
        }
        found |= self.chunks.get(chunk.key, {})
        if phase in found:
            return self.gap + found[phase]
        if phase in HALVES and "B" in found:
            return self.gap + found["B"] * share_of(chunk, phase)
        if phase == "B" and all(half in found for half in HALVES):
            return self.gap + sum(found[half] for half in HALVES)
        spec = chunk.phases.get(phase)  # at the speeds measured for other chunks
        return self.gap + (self.arithmetic * spec.flops + self.traffic * spec.bytes_moved if spec else 0.0)

    def touch(self, op: Op, nbytes: int) -> float:
        """Return the seconds of another local instruction, which reads and writes `nbytes` bytes."""
        if op == "compute":  # a backward was measured with the sums that it adds to
            return 0.0
        return self.gap + self.touches.get(op, self.touches.get("", NOTHING)).at(nbytes)

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        """Return the cost of a communication, whose latency counts once for each member but one."""
        twin = {"send": "recv", "recv": "send"}.get(op, op)
        line = self.talks.get(op) or self.talks.get(twin) or self.talks.get("", NOTHING)
        rounds = max(1, len(devices) - 1)
        return Talk(
            latency=self.gap + self.late.get(op, 0.0) + line.base * rounds,
            seconds=line.slope * nbytes,
            cores=1.0 if self.cores else 0.0,
        )


class MeasuredOn:
    """Measured computing on the links of a cluster: a strategy for machines that you do not have yet."""

    def __init__(self, measured: Measured, cluster: Cluster) -> None:
        self.measured, self.links = measured, Roofline(cluster)
        self.cores, self.node, self.wake = cluster.cores, cluster.devices, measured.wake
        self.period = cluster.period
        self.compute, self.talk = measured.compute, self.links.talk

    def touch(self, op: Op, nbytes: int) -> float:
        """Return the seconds of another local instruction, at the speeds measured.

        Copies between device and host that were not measured take the time of the cluster's link.
        """
        if OPS[op].host and op not in self.measured.touches:
            return self.links.touch(op, nbytes)
        return self.measured.touch(op, nbytes)


def share_of(chunk: Chunk, half: Phase) -> float:
    """Return a half's fraction of a whole backward: the mean of its fractions of arithmetic and traffic.

    Input gradients have more traffic for their arithmetic than weight gradients, which are matrix products
    alone. Either measure by itself is wrong by a fifth.
    """
    specs = [chunk.phases[phase] for phase in HALVES if phase in chunk.phases]
    mine = chunk.phases[half]
    parts = [
        getattr(mine, name) / total
        for name in ("flops", "bytes_moved")
        if (total := sum(getattr(spec, name) for spec in specs))
    ]
    return sum(parts) / len(parts) if parts else 0.0


def write_costs(costs: Measured, path: Path) -> None:
    """Write costs to a file."""
    content = {"piper_costs": FORM, "piper": VERSION, **to_json(costs)}
    write_output(path, json.dumps(content, indent=1) + "\n", '"piper_costs":', "the costs")


def read_costs(path: Path) -> Measured:
    """Read costs from their file."""
    with file_errors("this file holds no costs", path, HINT, *CONTENT):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["piper_costs"] != FORM:
            raise ValueError(f"it is of form {found['piper_costs']}, not {FORM}")
        return from_json(Measured, {**found, "source": str(path)})


def line_through(points: Sequence[tuple[float, float]], like: Line = NOTHING) -> Line:
    """Fit a line to points (size, seconds) with the least relative error.

    like: the prior where all points have one size. Its slope is kept and the base fitted if the base
    dominates at that size, otherwise its base is kept and the slope fitted. Without points it is the result.
    Points of one size count once, by their median, so that frequent sizes do not outweigh rare ones.
    """
    joined = [(size, median(times)) for size, times in by_size(points)]
    joined = [(size, seconds) for size, seconds in joined if seconds > 0]
    if not joined:
        return like
    if len(joined) == 1:
        size, seconds = joined[0]
        if not size or like.slope * size < like.base:
            return Line(base=max(0.0, seconds - like.slope * size), slope=like.slope)
        base = min(like.base, seconds)
        return Line(base=base, slope=(seconds - base) / size)
    fitted = two_features([(1.0, size, seconds) for size, seconds in joined])
    return Line(base=fitted[0], slope=fitted[1])


def by_size(points: Sequence[tuple[float, float]]) -> list[tuple[float, list[float]]]:
    """Return the seconds that each size took, in order of size."""
    return sorted(grouped(points).items())


def two_features(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a, b >= 0 so that a * x + b * y has the least relative error to z, over points (x, y, z)."""
    scaled = [(x / z, y / z) for x, y, z in points if z > 0]
    xx, yy = sum(x * x for x, _ in scaled), sum(y * y for _, y in scaled)
    xy, sx, sy = sum(x * y for x, y in scaled), sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone = [(sx / xx if xx else 0.0, 0.0), (0.0, sy / yy if yy else 0.0)]
    return min(alone, key=lambda ab: sum((ab[0] * x + ab[1] * y - 1) ** 2 for x, y in scaled))


CLUSTER = "h100"  # where nothing is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Costs, and the cluster or run that they come from."""

    costs: Costs
    name: str
    cluster: Cluster | None = None  # None: only costs are known
    measured: Measured | None = None

    def usable(self, plans: Plans) -> tuple[float | None, ...]:
        """Return the bytes of a device that each program may use. None: its memory is not known."""
        cluster = self.cluster
        return tuple(cluster.usable(communicators_of(plan)) if cluster else None for plan in plans)

    def check(self, outline: CapturedModel) -> None:
        """Refuse what was measured on another model."""
        costs = self.measured
        if costs is not None and costs.model != (mine := fingerprint(outline)):
            raise ConfigError(
                "these costs were measured on another model",
                by=costs.source,
                facts={"costs": f"model {costs.model}", "recipe": f"model {mine}"},
                hint="profile this model: piper train RECIPE --profile 5 --out DIR, then "
                "piper profile DIR --calibrate FILE",
            )


def prices_of(cluster: str | Path | None, costs: Path | None, *, default: str = CLUSTER) -> Prices:
    """Read measured costs, a cluster, or both. Refuse what cannot be read before anything costly.

    Both: computing takes as long as it was measured, communication as long as the cluster's links take.
    default: the cluster where neither is named.
    """
    if costs is None:
        machine = load_cluster(cluster or default)
        return Prices(costs=Roofline(machine), name=machine.name, cluster=machine)
    measured = read_costs(costs)
    if cluster is None:
        return Prices(costs=measured, name=measured.source, measured=measured)
    machine = load_cluster(cluster)
    return Prices(
        costs=MeasuredOn(measured, machine),
        name=f"{measured.source} with the links of {machine.name}",
        cluster=machine,
        measured=measured,
    )
