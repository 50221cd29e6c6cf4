"""Runs the plans of all devices together on symbols, in a random order that streams and events allow.

It knows the plan format and the outline, and nothing of how lowering works. Every instruction checks what it
reads; in the end every gradient must hold every row of every chunk once, every copy of a parameter the same update.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction

from piper.ir.graph import Graph
from piper.plan.instr import Instr
from piper.plan.plan import Bucket, Plan, Plans
from tests.lower.symbols import Held, Note, Rows, Share, Slope, Truth, Value, Weights

PEERS = ("counts", "exchange", "gather", "all_reduce", "reduce_scatter", "total", "broadcast")


@dataclass(slots=True)
class Device:
    """One device: its slots, the events of its streams, and how far each stream has come."""

    number: int
    plan: Plan
    lanes: dict[str, list[int]]  # by stream: the places of its instructions
    reached: dict[str, int]
    slots: dict[str, Value]
    counts: list[int]  # places at which the host waits
    events: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    ran: Counter[str] = field(default_factory=Counter)

    def head(self, stream: str) -> int | None:
        """The next instruction of a stream, once its events have come and the host has issued it."""
        lane, reached = self.lanes[stream], self.reached[stream]
        if reached == len(lane):
            return None
        place = lane[reached]
        if not self.events.issuperset(self.plan.instrs[place].waits):
            return None
        held = any(at < place and at not in self.done for at in self.counts)
        return None if held else place

    def finish(self, place: int, results: tuple[Value, ...]) -> None:
        """End an instruction: what it writes, what it frees, and its event."""
        ins = self.plan.instrs[place]
        self.slots.update(zip(ins.writes, results, strict=True))
        for slot in ins.frees:
            del self.slots[slot]
        if ins.signals is not None:
            self.events.add(ins.signals)
        self.done.add(place)
        self.reached[ins.stream] += 1

    def read(self, ins: Instr) -> list[Value]:
        missing = [slot for slot in ins.reads if slot not in self.slots]
        assert not missing, f"device {self.number}: {ins.op} {ins.node} finds no {missing}"
        return [self.slots[slot] for slot in ins.reads]


class Oracle:
    """All devices together."""

    def __init__(self, plans: Plans, graph: Graph, seed: int = 0) -> None:
        self.plans = plans
        self.truth = Truth(graph, plans.cells)
        self.rng = random.Random(seed)
        self.buffered = self.rng.random() < 0.5  # whether a send may end before its receive begins
        self.queues: dict[tuple[str, int], list[Value]] = {}
        self.devices = {number: self.device(number, plan) for plan in plans for number in plan.devices}
        self.peers = {
            (comm.name, device): group for comm in plans.comms.values() for group in comm.groups for device in group
        }
        self.pair = {
            comm.name: dict(pair for pair in comm.groups) for comm in plans.comms.values() if comm.kind == "pairs"
        }
        self.covered: Counter[str] = Counter()
        self.measured: dict[str, Fraction] = {}

    def device(self, number: int, plan: Plan) -> Device:
        lanes: dict[str, list[int]] = {}
        for place, ins in enumerate(plan.instrs):
            lanes.setdefault(ins.stream, []).append(place)
        slots: dict[str, Value] = {name: Note(name) for name in plan.residents}
        for bucket in self.plans.buckets.values():
            if number in bucket.devices:
                slots[f"{bucket.name}.param"] = Held(self.shards_of(bucket, number, ("old",) * bucket.group_size))
        counts = [place for place, ins in enumerate(plan.instrs) if ins.op == "counts"]
        return Device(number, plan, lanes, dict.fromkeys(lanes, 0), slots, counts)

    def shards_of(
        self, bucket: Bucket, device: int, versions: tuple[str | None, ...]
    ) -> tuple[str | None, ...]:
        """What a device holds of a bucket between uses: its shard where parameters are sharded."""
        if bucket.zero < 3:
            return versions
        mine = self.group(bucket, device).index(device)
        return tuple(version if i == mine else None for i, version in enumerate(versions))

    @staticmethod
    def group(bucket: Bucket, device: int) -> tuple[int, ...]:
        return next(group for group in bucket.groups if device in group)

    def run(self) -> None:
        """Run everything, then check what is left."""
        lanes = [(device, stream) for device in self.devices.values() for stream in device.lanes]
        moved = True
        while moved:
            moved = False
            self.rng.shuffle(lanes)
            for device, stream in lanes:
                for _ in range(self.rng.randint(1, 4)):
                    place = device.head(stream)
                    if place is None or not self.step(device, place):
                        break
                    moved = True
        for device in self.devices.values():
            stuck = [p for p in range(len(device.plan.instrs)) if p not in device.done]
            assert not stuck, f"device {device.number} is stuck\n{device.plan.around(stuck[0])}"
            left = set(device.slots) - set(device.plan.residents)
            assert not left, f"device {device.number} keeps {left}"
        self.check_counts()
        self.check_updates()

    def step(self, device: Device, place: int) -> bool:
        """Run an instruction, if its peers are there."""
        ins = device.plan.instrs[place]
        if ins.op in PEERS:
            group = self.peers[ins.comm, device.number] if ins.comm else (device.number,)
            places = [self.waiting(self.devices[number], ins) for number in group]
            if any(at is None for at in places):
                return False
            members = [self.devices[number] for number in group]
            found = [m.plan.instrs[at] for m, at in zip(members, places, strict=True) if at is not None]
            results = getattr(self, ins.op)(members, found)
            for member, at, result in zip(members, places, results, strict=True):
                assert at is not None
                member.finish(at, result)
            return True
        if ins.op == "send":
            return self.send(device, place, ins)
        if ins.op == "recv":
            queue = self.queues.get((ins.comm or "", device.number))
            if not queue:
                return False
            device.finish(place, (queue.pop(0),))
            return True
        device.finish(place, getattr(self, ins.op)(device, ins, device.read(ins)))
        return True

    @staticmethod
    def waiting(device: Device, ins: Instr) -> int | None:
        """Where a peer waits with the same instruction, if it does."""
        for stream in device.lanes:
            place = device.head(stream)
            if place is not None:
                other = device.plan.instrs[place]
                if (other.op, other.node, other.comm) == (ins.op, ins.node, ins.comm):
                    return place
        return None

    def send(self, device: Device, place: int, ins: Instr) -> bool:
        assert ins.comm is not None
        receiver = self.pair[ins.comm][device.number]
        queue = self.queues.setdefault((ins.comm, receiver), [])
        if not self.buffered:
            other = self.devices[receiver]
            heads = (other.head(stream) for stream in other.lanes)
            ready = any(
                at is not None and (other.plan.instrs[at].op, other.plan.instrs[at].comm) == ("recv", ins.comm)
                for at in heads
            )
            if not ready or queue:
                return False
        queue.append(cut(device.read(ins)[0], ins.arg))
        device.finish(place, ())
        return True

    def load(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        return (Rows(f"batch.{ins.arg}", self.truth.slice(ins.devices, device.number, ins.part)),)

    def compute(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        """Check all that a phase reads, and give what it should."""
        phase, _, name = ins.arg.partition(" ")
        truth, chunk = self.truth, self.truth.chunks[name]
        spec = chunk.phases[phase]  # type: ignore[index]
        rows, share = truth.rows(name, device.number, ins.part)
        device.ran[ins.node] += 1
        wanted: list[Value] = [truth.value(chunk.inputs[i], name, device.number, ins.part) for i in spec.inputs]
        needed = [b for b in self.plans.buckets.values() if name in b.chunks and uses(b, spec.params)]
        wanted += [Held(("old",) * b.group_size) for b in needed]
        assert {p.name for b in needed for p in b.pieces} >= set(spec.params)
        late = set(chunk.phases["BW"].saved) if "BW" in chunk.phases else set()
        bundles = {"saved": set(range(len(chunk.saved))) - late, "kept": late}
        buffers = [f"buffer.{b}" for b in spec.buffers]
        wanted += [device.slots[b] for b in buffers]
        notes = [b for b, members in bundles.items() if members & (set(spec.saved) if phase != "F" else members)]
        if phase != "F":
            wanted += [Note(f"{name}.{bundle}", rows, share) for bundle in notes]
            wanted += [Note(f"{name}.carried", rows, share)] if spec.carried else []
        loss = self.truth.outline.loss
        for index in spec.tangents:
            start = (name, index) == (loss.chunk, loss.index)
            wanted.append(Note("seed") if start else truth.slope(f"{name}.out{index}", name, device.number, ins.part))
        assert reads == wanted, f"device {device.number}: {ins.node} reads\n{reads}\nwanted\n{wanted}"
        if phase == "F":
            given: list[Value] = [
                truth.output(name, i, device.number, ins.part) for i in range(len(chunk.outputs))
            ]
            given += [Note(f"{name}.{bundle}", rows, share) for bundle in notes]
            return (*given, *(self.mutate(device, buffer, ins) for buffer in chunk.mutated))
        given = [self.slope_of_input(chunk.name, i, rows, share) for i in spec.grad_inputs]
        if phase == "BI":
            return (*given, *([Note(f"{name}.carried", rows, share)] if chunk.carried else []))
        for bucket in self.plans.buckets.values():
            pieces = [p.name for p in bucket.pieces if p.name in spec.grad_params]
            if name in bucket.chunks and pieces:
                given.append(Weights({p: Counter((name, row, share) for row in rows) for p in pieces}))
        return tuple(given)

    def slope_of_input(self, name: str, position: int, rows: tuple[object, ...], share: Share) -> Slope:
        source = self.truth.name(self.truth.chunks[name].inputs[position])
        return Slope(Rows(source, rows, share), ((name, position),))  # type: ignore[arg-type]

    @staticmethod
    def mutate(device: Device, buffer: str, ins: Instr) -> Value:
        before = device.slots[f"buffer.{buffer}"]
        assert isinstance(before, Note)
        return replace(before, what=f"{before.what}, {device.number} {ins.node}")

    def add(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        left, right = reads
        assert isinstance(left, Slope) and isinstance(right, Slope) and left.of == right.of
        assert not set(left.terms) & set(right.terms), f"{ins.node} adds a gradient twice"
        return (Slope(left.of, tuple(sorted((*left.terms, *right.terms)))),)

    def copy(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        return (cut(reads[0], ins.arg),)

    def concat(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        whole = reads[0]
        for piece in reads[1:]:
            whole = joined(whole, piece)
        return (whole,)

    def accumulate(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        value, *total = reads
        if isinstance(value, Rows):
            before = total[0] if total else Counter()
            assert isinstance(before, Counter)
            return (before + Counter(value.rows),)
        assert isinstance(value, Weights)
        return (plus(value, *total),)

    def norm(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        """Each element of a gradient counts once over all devices."""
        for slot, value in zip(ins.reads, reads, strict=True):
            if isinstance(value, Weights):
                bucket = self.plans.buckets[slot.rpartition(".")[0]]
                part = Fraction(1, bucket.ways * (value.shard[1] if value.shard else 1) * bucket.copies)
                for name in value.terms:
                    self.measured[name] = self.measured.get(name, Fraction()) + part
            else:
                device.slots[f"sum.{slot}"] = value
        return (Note("norm"),)

    def update(self, device: Device, ins: Instr, reads: list[Value]) -> tuple[Value, ...]:
        """Check every final gradient, and give each parameter its new version."""
        results: list[Value] = []
        for slot, gradient, written in zip(ins.reads, reads, ins.writes, strict=False):
            bucket = self.plans.buckets[slot.rpartition(".")[0]]
            assert written == f"{bucket.name}.param" and isinstance(gradient, Weights)
            group = self.group(bucket, device.number)
            mine = group.index(device.number)
            assert gradient.shard == ((mine, len(group)) if bucket.zero else None), slot
            share = (bucket.devices.index(device.number) % bucket.ways, bucket.ways)
            for piece in bucket.pieces:
                wanted = self.truth.gradient(piece.name, share)
                found = gradient.terms.get(piece.name, Counter())
                assert found == wanted, f"{piece.name} on {device.number}: {wrong(found, wanted)}"
                self.covered[piece.name] += 1
            held = device.slots[written]
            assert isinstance(held, Held)
            new = gradient.frozen()
            own = {mine} if bucket.zero else set(range(len(group)))
            results.append(Held(tuple(new if i in own else old for i, old in enumerate(held.versions))))
        assert len(results) == len(ins.writes)
        return tuple(results)

    def counts(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        values = [device.read(ins)[0] for device, ins in zip(members, found, strict=True)]
        moved = dispersed(values)
        splits = [Note(found[0].arg, v.rows) for v in values if isinstance(v, Rows)]
        return [(split, value) for split, value in zip(splits, moved, strict=True)]

    def exchange(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        reads = [device.read(ins) for device, ins in zip(members, found, strict=True)]
        way, _, chunk = found[0].arg.partition(" ")
        route = self.truth.chunks[chunk]
        name = chunk if route.kind == "route" else route.inputs[1].chunk  # type: ignore[union-attr]
        splits = [splits for _, splits in reads]
        assert all(isinstance(split, Note) and split.what == name for split in splits), found[0].node
        values = [value for value, _ in reads]
        moved = dispersed(values) if way == "out" else returned(values, splits)
        if way == "out":
            for value, split in zip(values, splits, strict=True):
                assert rows_of(value).rows == split.rows, f"{found[0].node} moves other rows than it counted"  # type: ignore[union-attr]
        return [(value,) for value in moved]

    def gather(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        bucket = self.plans.buckets[found[0].arg]
        versions: list[str | None] = []
        for i, (device, ins) in enumerate(zip(members, found, strict=True)):
            held = device.read(ins)[0]
            assert isinstance(held, Held) and held.versions[i] is not None
            assert tuple(m.number for m in members) == self.group(bucket, device.number)
            versions.append(held.versions[i])
        return [(Held(tuple(versions)),) for _ in members]

    def all_reduce(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        values = [device.read(ins) for device, ins in zip(members, found, strict=True)]
        given = [value for value, *_ in filter(None, values)]
        total = plus(*given)
        return [(total,) for _ in members]

    def reduce_scatter(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        reads = [device.read(ins) for device, ins in zip(members, found, strict=True)]
        total = plus(*(value for value, *_ in reads))
        assert total.shard is None
        for ins in found:
            assert ins.reads[0] in ins.frees, f"{ins.node} leaves a whole gradient behind"
        results: list[tuple[Value, ...]] = []
        for i, (_, *before) in enumerate(reads):
            shard = replace(total, shard=(i, len(members)))
            results.append((plus(shard, *before),))
        return results

    def total(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        """The losses of all devices: every slice once."""
        outline = self.truth.outline
        for name, source in (("loss", outline.loss), ("weight", outline.weight)):
            if source is not None:
                sums = [device.slots.pop(f"sum.{name}", Counter()) for device in members]
                found_rows: Counter[object] = Counter()
                for one in sums:
                    found_rows.update(one)  # type: ignore[arg-type]
                assert found_rows == self.truth.losses(source), f"{name}: {found_rows}"
        return [(Note("total"),) for _ in members]

    def broadcast(self, members: list[Device], found: list[Instr]) -> list[tuple[Value, ...]]:
        first = tuple(members[0].read(found[0]))
        return [first for _ in members]

    def check_counts(self) -> None:
        """Every phase of every chunk ran once on each of its devices, for each part."""
        for chunk in self.truth.outline.chunks:
            if chunk.kind not in ("compute", "expert"):
                continue
            for number in self.truth.homes[chunk.name]:
                ran = self.devices[number].ran
                for part in self.truth.parts[chunk.name]:
                    suffix = "".join(f" {axis}={i}" for axis, i in part)
                    times = {phase: ran[f"{phase}[{chunk.name}{suffix}]"] for phase in ("F", "B", "BI", "BW")}
                    assert times["F"] == 1, times
                    gives = "B" in chunk.phases and bool(chunk.phases["B"].grad_params)
                    assert times["B"] + times["BW"] == 1 or not gives, times
                    assert times["B"] + max(times["BI"], times["BW"]) == int("B" in chunk.phases), times

    def check_updates(self) -> None:
        """Whatever trains was updated, everywhere alike, and its gradient measured once."""
        users: dict[tuple[str, Share], set[object]] = {}
        for bucket in self.plans.buckets.values():
            for number in bucket.devices:
                held = self.devices[number].slots[f"{bucket.name}.param"]
                assert isinstance(held, Held)
                share = (bucket.devices.index(number) % bucket.ways, bucket.ways)
                for piece in bucket.pieces:
                    trains = bool(self.truth.gradient(piece.name, share))
                    versions = [v for v in held.versions if v is not None]
                    assert all((v != "old") == trains for v in versions), f"{piece.name} on {number}: {versions}"
                    users.setdefault((piece.name, share), set()).update(versions)
                    assert self.measured.get(piece.name, 0) == int(trains), f"{piece.name}: {self.measured}"
        for (name, _), versions_seen in users.items():
            assert len(versions_seen) == 1, f"copies of {name} differ"
        outline = self.truth.outline
        slices = len(self.truth.homes[outline.loss.chunk]) * len(self.truth.parts[outline.loss.chunk])
        assert self.plans.seed == (1.0 if outline.weight else 1.0 / slices)


def uses(bucket: Bucket, params: tuple[str, ...]) -> bool:
    return any(piece.name in params for piece in bucket.pieces)


def rows_of(value: Value) -> Rows:
    if isinstance(value, Slope):
        return value.of
    assert isinstance(value, Rows)
    return value


def with_rows(value: Value, rows: Rows) -> Value:
    return replace(value, of=rows) if isinstance(value, Slope) else rows


def cut(value: Value, arg: str) -> Value:
    """The rows that a send takes: `start:stop/of`."""
    if not arg:
        return value
    span, _, of = arg.partition("/")
    start, stop = (int(number) for number in span.split(":"))
    rows = rows_of(value)
    each, left = divmod(len(rows.rows), int(of))
    assert not left and rows.rows, f"{arg} of {len(rows.rows)} rows"
    return with_rows(value, replace(rows, rows=rows.rows[start * each : stop * each]))


def joined(left: Value, right: Value) -> Value:
    a, b = rows_of(left), rows_of(right)
    whole = replace(a, rows=(*a.rows, *b.rows))
    assert with_rows(left, whole) == with_rows(right, whole), "pieces of different values are joined"
    return with_rows(left, whole)


def dispersed(values: list[Value]) -> list[Value]:
    """An all-to-all outward: each member gets all rows, for its own share of the experts."""
    rows = [rows_of(value) for value in values]
    assert len({r.name for r in rows}) == 1 and all(r.share == (0, 1) for r in rows)
    every = tuple(row for one in rows for row in one.rows)
    shares = [(i, len(values)) for i in range(len(values))]
    return [
        with_rows(v, replace(r, rows=every, share=s)) for v, r, s in zip(values, rows, shares, strict=True)
    ]


def returned(values: list[Value], splits: list[Value]) -> list[Value]:
    """An all-to-all back: each member gets its own rows from every share of the experts."""
    rows = [rows_of(value) for value in values]
    every = tuple(row for split in splits for row in split.rows)  # type: ignore[union-attr]
    for i, one in enumerate(rows):
        assert one.rows == every and one.share == (i, len(values)) and one.name == rows[0].name
    return [
        with_rows(value, Rows(rows[0].name, split.rows))  # type: ignore[union-attr]
        for value, split in zip(values, splits, strict=True)
    ]


def plus(first: Value, *others: Value) -> Weights:
    assert isinstance(first, Weights)
    for other in others:
        assert isinstance(other, Weights)
        first = first.plus(other)
    return first


def wrong(found: "Counter[tuple[str, tuple[int, object], Share]]", wanted: "Counter[object]") -> str:
    more = {k: v for k, v in (found - wanted).items()}  # type: ignore[operator]
    less = {k: v for k, v in (wanted - found).items()}  # type: ignore[operator]
    return f"too many {more}, too few {less}"


def examine(plans: Plans, graph: Graph, seed: int = 0) -> None:
    """Assert that plans compute what the graph means."""
    Oracle(plans, graph, seed).run()
