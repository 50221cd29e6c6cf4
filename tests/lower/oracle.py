"""What instructions do to symbols, and what must be true in the end.

It knows the plan format and the outline, and nothing of how lowering works. Every instruction checks what it
reads; in the end every gradient must hold every row of every chunk once, and every copy of a parameter the same.
"""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from piper.ir.chunk import Output, Phase, Tags
from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.plan.instr import Instr, Routing
from piper.plan.plan import Bucket, Plan, Plans
from tests.lower.expected import Expected
from tests.lower.lifetimes import check_lifetimes, check_reruns
from tests.lower.machine import Device, Machine, Results
from tests.lower.symbols import (
    Held,
    Note,
    Row,
    Rows,
    Share,
    Value,
    Weights,
    accumulated,
    added,
    cut,
    dispersed,
    joined,
    plus,
    returned,
    rows_of,
)

RUNS = ("F", "B", "BI", "BW", "R")


def examine(plans: Plans, graph: Graph, *seeds: int) -> None:
    """Assert that plans compute what the graph means, in some of many orders that they allow."""
    expected = Expected(plans, graph)
    for seed in seeds or (0,):
        oracle = Oracle(plans, expected)
        machine = Machine(plans, oracle.residents, oracle.alone, oracle.together, seed)
        machine.run()
        oracle.check_runs(machine.devices)
        oracle.check_updates(machine.devices)
        oracle.check_buffers(machine.devices)
    check_lifetimes(plans)
    check_reruns(plans, graph.reruns)


class Oracle:
    """The meaning of every instruction, in one run of the plans."""

    def __init__(self, plans: Plans, expected: Expected) -> None:
        self.plans = plans
        self.expected, self.truth = expected, expected.truth
        self.measured: dict[str, Fraction] = {}  # how often each parameter's gradient is in the norm
        self.sums: dict[str, Counter[Row]] = {"loss": Counter(), "weight": Counter()}

    def residents(self, number: int, plan: Plan) -> dict[str, Value]:
        """What a device holds when a step begins."""
        slots: dict[str, Value] = {name: Note(name) for name in plan.residents}
        for bucket in self.plans.buckets.values():
            if number in bucket.devices:
                mine = group_of(bucket, number).index(number)
                kept = [mine] if bucket.zero == 3 else range(bucket.group_size)
                versions = tuple("old" if i in kept else None for i in range(bucket.group_size))
                slots[f"{bucket.name}.param"] = Held(versions)
        return slots

    def alone(self, device: Device, ins: Instr, reads: list[Value]) -> Results:
        """What an instruction of one device writes."""
        match ins.op:
            case "load":
                field = ins.loads
                return (
                    Rows(f"batch.{field.name}", self.truth.slice(field.devices, device.number, field.part)),
                )
            case "compute":
                return self.compute(device, ins, reads)
            case "add":
                return (added(*reads),)
            case "copy":
                return (cut(reads[0], ins.payload),)
            case "concat":
                return (joined(reads),)
            case "accumulate":
                return (accumulated(*reads),)
            case "norm":
                return self.norm(ins, reads)
            case "update":
                return tuple(
                    self.updated(device, *found) for found in zip(ins.reads, ins.writes, reads, strict=False)
                )
        raise AssertionError(ins.op)

    def together(self, members: list[Device], found: list[Instr]) -> list[Results]:
        """What a collective writes on each of its members."""
        reads = [device.read(ins) for device, ins in zip(members, found, strict=True)]
        match found[0].op:
            case "counts":
                values = [value for value, *_ in reads]
                splits = [Note(routing(found[0]).run.chunk, rows_of(value).rows) for value in values]
                return list(zip(splits, dispersed(values), strict=True))
            case "exchange":
                return [(value,) for value in self.exchange(found[0], reads)]
            case "gather":
                return self.gather(members, found[0], reads)
            case "all_reduce":
                return [(plus(*(value for value, *_ in filter(None, reads))),)] * len(members)
            case "reduce_scatter":
                so_far = [ins.reads[-1:] == ins.writes for ins in found]  # a member may have nothing to give
                before = [values[-1:] if again else [] for values, again in zip(reads, so_far, strict=True)]
                given = [values[: len(values) - again] for values, again in zip(reads, so_far, strict=True)]
                total = plus(*(value for values in given for value in values))
                assert total.shard is None
                shards = [replace(total, shard=(i, len(members))) for i in range(len(members))]
                return [(plus(shard, *held),) for shard, held in zip(shards, before, strict=True)]
            case "total":
                return [(Note("total"),)] * len(members)
            case "broadcast":
                return [tuple(reads[0])] * len(members)
        raise AssertionError(found[0].op)

    def compute(self, device: Device, ins: Instr, reads: list[Value]) -> Results:
        """Check all that a phase reads, and give what it should."""
        device.ran[ins.node] += 1
        expected = self.expected.of(device.number, ins)
        wanted = expected.reads(device.slots)
        assert reads == wanted, f"device {device.number}: {ins.node} reads\n{reads}\nwanted\n{wanted}"
        if not expected.mutated:
            return expected.gives
        return (*expected.gives, *(mutated(device, buffer, ins) for buffer in expected.mutated))

    def exchange(self, ins: Instr, reads: list[list[Value]]) -> list[Value]:
        """Rows out to the shares of the experts, or back to their owners, as they were counted."""
        chunk = routing(ins).run.chunk
        marker = self.truth.chunks[chunk]
        counted = marker.inputs[1]
        route = chunk if marker.kind == "route" else counted.chunk if isinstance(counted, Output) else ""
        owned: list[tuple[Row, ...]] = []
        for _, split in reads:
            assert isinstance(split, Note) and split.what == route, f"{ins.node} goes by {split}"
            owned.append(split.rows)
        values = [value for value, _ in reads]
        if not routing(ins).outward:
            return returned(values, owned)
        assert [rows_of(value).rows for value in values] == owned, (
            f"{ins.node} moves rows that it did not count"
        )
        return dispersed(values)

    def gather(self, members: list[Device], ins: Instr, reads: list[list[Value]]) -> list[Results]:
        """Each member's own shard, for all."""
        bucket = self.plans.buckets[ins.bucket]
        assert tuple(member.number for member in members) in bucket.groups
        versions: list[str | None] = []
        for i, (held, *_) in enumerate(reads):
            assert isinstance(held, Held) and held.versions[i] is not None
            versions.append(held.versions[i])
        return [(Held(tuple(versions)),)] * len(members)

    def norm(self, ins: Instr, reads: list[Value]) -> Results:
        """Take down what part of each gradient this device answers for, and its losses."""
        for slot, value in zip(ins.reads, reads, strict=True):
            if isinstance(value, Weights):
                bucket = self.plans.buckets[slot.owner]
                shards = value.shard[1] if value.shard else 1
                for name in value.terms:
                    part = Fraction(1, bucket.ways * shards * bucket.copies)
                    self.measured[name] = self.measured.get(name, Fraction()) + part
            else:
                assert isinstance(value, Counter)
                self.sums[slot].update(value)
        return (Note("norm"),)

    def updated(self, device: Device, slot: SlotId, written: SlotId, gradient: Value) -> Value:
        """Check a final gradient, and give the parameters a new version."""
        bucket = self.plans.buckets[slot.owner]
        assert written == f"{bucket.name}.param" and isinstance(gradient, Weights)
        group = group_of(bucket, device.number)
        mine = group.index(device.number)
        assert gradient.shard == ((mine, len(group)) if bucket.zero else None), slot
        for piece in bucket.pieces:
            wanted = self.truth.gradient(piece.name, share_of(bucket, device.number))
            found = gradient.terms.get(piece.name, Counter())
            if found != wanted:
                less, more = dict(wanted - found), dict(found - wanted)
                raise AssertionError(f"{piece.name} on {device.number}: too few {less}, too many {more}")
        held = device.slots[written]
        assert isinstance(held, Held)
        own, new = [mine] if bucket.zero else range(len(group)), str(gradient)
        return Held(tuple(new if i in own else old for i, old in enumerate(held.versions)))

    def check_runs(self, devices: dict[int, Device]) -> None:
        """Every phase of every chunk ran once on each of its devices, for each part; some forwards again."""
        known: dict[Tags, set[str]] = {}
        for chunk in self.truth.outline.chunks:
            if chunk.kind not in ("compute", "expert"):
                continue
            for part in self.truth.parts[chunk.name]:
                for number in devices:
                    if number not in self.truth.homes[chunk.name][part]:
                        assert not any(devices[number].ran[node_of(p, chunk.name, part)] for p in RUNS)
                        continue
                    if part not in known:
                        known[part] = self.truth.again(self.backwards(devices, part))
                    ran = {phase: devices[number].ran[node_of(phase, chunk.name, part)] for phase in RUNS}
                    what = f"{chunk.name} {part} on {number}: {ran}"
                    assert ran["F"] == 1, what
                    assert ran["B"] + max(ran["BI"], ran["BW"]) == int("B" in chunk.phases), what
                    assert ran["R"] == int(chunk.name in known[part]), what

    def backwards(self, devices: dict[int, Device], part: Tags) -> dict[str, list[Phase]]:
        """The phases that ran after the forward of each chunk that runs again, on one part."""
        phases: tuple[Phase, ...] = ("B", "BI", "BW")
        return {
            name: [phase for phase in phases if ran[node_of(phase, name, part)]]
            for name in self.truth.graph.reruns
            if (ran := devices[self.truth.homes[name][part][0]].ran)
        }

    def check_updates(self, devices: dict[int, Device]) -> None:
        """What trains is new, alike everywhere, and measured once; each slice's loss is in the sum once."""
        versions: dict[tuple[str, Share], set[str | None]] = {}
        for bucket in self.plans.buckets.values():
            for number in bucket.devices:
                held = devices[number].slots[f"{bucket.name}.param"]
                assert isinstance(held, Held)
                share = share_of(bucket, number)
                for piece in bucket.pieces:
                    trains = bool(self.truth.gradient(piece.name, share))
                    seen = {version for version in held.versions if version is not None}
                    assert all((version != "old") == trains for version in seen), f"{piece.name} on {number}"
                    versions.setdefault((piece.name, share), set()).update(seen)
                    assert self.measured.get(piece.name, 0) == int(trains), f"{piece.name}: {self.measured}"
        for (name, _), copies in versions.items():
            assert len(copies) == 1, f"the copies of {name} differ"
        outline = self.truth.outline
        assert self.sums["loss"] == self.truth.losses(outline.loss)
        assert self.sums["weight"] == (self.truth.losses(outline.weight) if outline.weight else Counter())
        slices = sum(map(len, self.truth.homes[outline.loss.chunk].values()))
        assert (self.plans.seed, self.plans.weighted) == (
            (1.0, True) if outline.weight else (1.0 / slices, False)
        )

    def check_buffers(self, devices: dict[int, Device]) -> None:
        """A buffer that is written has been through one replica's forwards, the same for all."""
        for chunk in self.truth.outline.chunks:
            homes, ways = self.truth.homes[chunk.name].values(), self.truth.ways(chunk.name)
            home = tuple(dict.fromkeys(number for each in homes for number in each))
            for name in chunk.mutated:
                for position, number in enumerate(home):
                    held = devices[number].slots[f"buffer.{name}"]
                    assert isinstance(held, Note)
                    writers = {text.split()[0] for text in held.what.split(", ")[1:]}
                    assert writers == {str(home[position % ways])}, f"{name} on {number}: {held}"


def node_of(phase: str, chunk: str, part: Tags) -> str:
    """What plans call a phase of a chunk on one part; R is a forward that runs again."""
    return f"{phase}[{chunk}{''.join(f' {axis}={i}' for axis, i in part)}]"


def group_of(bucket: Bucket, device: int) -> tuple[int, ...]:
    return next(group for group in bucket.groups if device in group)


def routing(ins: Instr) -> Routing:
    """How rows travel."""
    assert isinstance(ins.payload, Routing)
    return ins.payload


def share_of(bucket: Bucket, device: int) -> Share:
    return (bucket.devices.index(device) % bucket.ways, bucket.ways)


def mutated(device: Device, buffer: str, ins: Instr) -> Value:
    """A buffer that remembers who wrote it."""
    before = device.slots[f"buffer.{buffer}"]
    assert isinstance(before, Note)
    return replace(before, what=f"{before.what}, {device.number} {ins.node}")
