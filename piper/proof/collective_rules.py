"""The effect of communication on symbolic values: transfers between programs, collectives within groups."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from piper.ir.devices import show
from piper.ir.grouping import grouped
from piper.ir.ids import TOTAL, Pass, SlotId, param_slot
from piper.ir.mesh import EXPERTS
from piper.ir.sharding import show_collective
from piper.plan.bucket import Bucket, Extent, ShardCollective
from piper.plan.instr import Instr
from piper.plan.ops import OfBucket, Op, Payload, Routing
from piper.plan.plan import Comm
from piper.proof.covers import once
from piper.proof.local_rules import LocalRules, described
from piper.proof.symbolic_state import ProgramInstr, SymbolicState, resharded_version
from piper.proof.symbolic_values import IN_FULL, NO_COVER, Amount, SymbolicValue, Terms, Value

FOR_USE = {"old shard": "old", "new shard": "new"}  # versions of parameters, and of what is gathered of them
AFTER_UPDATE = {version: version for version in ("old", "new", "old shard", "new shard")} | {
    "partly new": "new",
    "partly new shard": "new shard",
}
HELD: Mapping[str, Extent] = {"grad": "whole", "grad_inside": "held", "grad_shard": "owned"}
# ^ of a gradient, by the kind of its slot


def subject(ins: Instr) -> Payload:
    """Return what an instruction is about, without its microbatch. Members of a collective agree on it."""
    match ins.payload:
        case Routing(run=run, outward=outward):
            return Routing(run=Pass(phase="F", chunk=run.chunk), outward=outward)
        case OfBucket(bucket=bucket):
            return OfBucket(bucket=bucket)
    return ins.payload


class CollectiveRules:
    """Runs communication: the values that one side sends are those that the other receives."""

    def __init__(self, state: SymbolicState, local: LocalRules) -> None:
        self.state, self.local = state, local
        self.symbols, self.covers, self.spec = state.symbols, state.covers, state.spec
        self.by_member: dict[Op, Callable[[Comm | None, ProgramInstr], None]] = {
            "counts": self.route,
            "exchange": self.route,
            "collect": self.collect,
            "reshard": self.reshard,
            "total": self.total,
            "broadcast": self.broadcast,
            "mirror": self.mirror,
        }
        self.together: dict[Op, Callable[[Comm | None, Sequence[ProgramInstr]], None]] = {
            "gather": self.gather,
            "all_reduce": self.all_reduce,
            "reduce_scatter": self.reduce_scatter,
        }

    def receive(self, at: ProgramInstr, comm: Comm, sent: dict[int, Value | None]) -> None:
        """Receive what the programs on the other side of a pipe sent."""
        values = {sender: value for sender, value in sent.items() if value is not None}
        same = set(map(self.symbols.without_samples, values.values()))
        if len(values) < len(sent) or len(at.ins.writes) != 1:
            return  # the sender has been complained about, or nothing is written that could be read
        if len(same) != 1:
            given = ", ".join(sorted(map(self.symbols.describe, values.values())))
            self.state.complain(at, f"receives different values from different devices: {given}")
            return
        number, about, amount = next(iter(values.values()))
        covers = tuple((sender, self.symbols.symbol(value).cover) for sender, value in sorted(values.items()))
        if NO_COVER not in dict(covers).values():
            number = self.symbols.moved(number, self.covers.received(comm.name, at.program, covers))
        at.slots[at.ins.writes[0]] = number, about, amount

    def meet(self, comm: Comm | None, members: Sequence[ProgramInstr]) -> None:
        """Run a collective, now that all its members have reached it."""
        subjects = {subject(member.ins) for member in members}
        if len(subjects) > 1:
            what = " and ".join(sorted(map(described, subjects)))
            self.state.complain(members[0], f"is about different things on its devices: {what}")
            return
        op = members[0].ins.op
        if op in self.together:
            self.together[op](comm, members)
            return
        for member in members:
            self.by_member[op](comm, member)

    def mirror(self, comm: Comm | None, member: ProgramInstr) -> None:
        """Give copies of the state to other devices."""
        for slot in member.ins.reads:
            value = member.slots.get(slot)
            wanted = self.state.value(SymbolicValue("copy", slot.owner))
            if value != wanted:
                self.state.mismatch(member, slot, value, wanted)

    def route(self, comm: Comm | None, member: ProgramInstr) -> None:
        """Agree on the rows that travel to experts, or send rows there or back."""
        rows, part, at = member.ins.payload, member.ins.part, self.state.expected_at(member.ins.part)
        assert isinstance(rows, Routing), f"{member.ins.node} routes no rows"
        chunk = rows.run.chunk
        if member.ins.op == "counts":
            expected = at.of_counts(member.program, chunk)
            problem = f"counts the rows of {chunk}, which has no sharded experts here"
        else:
            # The forward of a route goes out, of an unroute back.
            backward = chunk in self.spec.chunks and rows.outward != (self.spec.chunks[chunk].kind == "route")
            expected = at.of_move(member.program, chunk, rows=True, backward=backward)
            problem = f"has {described(rows)}, which must not happen here"
        if expected is None:
            self.state.complain(member, problem)
            return
        if comm is not None:
            groups = partial(at.meshes[chunk].by_expert.groups, EXPERTS)
            self.state.check_groups(member, comm, f"experts {chunk}", groups)
        self.local.follow(member, expected)
        terms = self.local.terms.setdefault(member.program, set())
        terms.update(("overflows", (symbol, part, n)) for symbol, _, n in expected.writes[2:])

    def collect(self, comm: Comm | None, at: ProgramInstr) -> None:
        """Run a member of a collective, or a slice: a value of its group gets another layout."""
        collecting, run, expected = at.ins.collects, at.ins.collects.run, None
        here, chunk, backward = self.state.expected_at(run.part), run.chunk, run.phase != "F"
        if run.phase != "BW" and not run.again:
            expected = here.of_move(at.program, chunk, rows=False, backward=backward)
        if expected is None:
            self.state.complain(at, f"has {described(collecting)}, which must not happen here")
            return
        how = self.spec.chunks[chunk].collective
        assert how is not None, "its chunk is a collective"
        wanted = how.adjoint if backward else how
        if collecting.how != wanted:
            does, should = show_collective(collecting.how), show_collective(wanted)
            self.state.complain(at, f"does {does}; it should do {should}")
        self.local.follow(at, expected)
        mesh = here.meshes[chunk]
        if at.ins.op == "slice":
            given = collecting.devices, collecting.stride
            right = mesh.devices, mesh.axis(wanted.axis).stride
            if wanted.op != "slice":
                self.state.complain(at, f"takes a part by itself; it should be {show_collective(wanted)}")
            elif given != right:
                takes, should = (f"{show(devices)}, {apart} apart" for devices, apart in (given, right))
                self.state.complain(at, f"takes the parts of devices {takes}; it should be {should}")
        elif wanted.op == "slice":
            self.state.complain(at, "communicates; each device should take its own part")
        elif comm is not None:
            self.state.check_groups(at, comm, f"{wanted.axis} of {chunk}", partial(mesh.groups, wanted.axis))
        elif wanted.degree > 1:
            self.state.complain(at, f"has no communicator; it should go over {wanted.degree} devices")

    def bucket_of(self, member: ProgramInstr) -> Bucket | None:
        """Return the bucket that a gather or a reduction names. None: its device holds nothing of it."""
        bucket = self.state.plans.buckets.get(member.ins.bucket)
        return bucket if bucket is not None and self.state.is_on(member.program, bucket) else None

    def gather(self, comm: Comm | None, members: Sequence[ProgramInstr]) -> None:
        """Gather the shards of a bucket."""
        for member in members:
            name, bucket = member.ins.bucket, self.bucket_of(member)
            slot = param_slot(name)
            ins, value, in_place = member.ins, member.slots.get(slot), member.ins.writes == (slot,)
            how = None
            if bucket is not None:
                how = bucket.gather_updated if in_place else bucket.gather_for_use
            known = value is not None and self.symbols.symbol(value) == SymbolicValue("param", name)
            about = str(value[1]) if value is not None and known and ins.reads == (slot,) else ""
            version = (AFTER_UPDATE if in_place else FOR_USE).get(about)
            if bucket is None or how is None or version is None or len(ins.writes) != 1:
                read, written = ", ".join(ins.reads), ", ".join(ins.writes)
                contents = f"{slot} holds {self.symbols.describe(value)}"
                self.state.complain(member, f"gathers {read} into {written} for {name!r}; {contents}")
                continue
            self._check_members(member, comm, bucket, how)
            member.slots[member.ins.writes[0]] = self.state.value(SymbolicValue("param", name), version)
        gathered = {m.slots.get(m.ins.writes[0]) if m.ins.writes else None for m in members}
        if len(gathered) > 1:
            given = " and ".join(sorted(map(self.symbols.describe, gathered)))
            self.state.complain(members[0], f"gathers shards of different steps: {given}")

    def all_reduce(self, comm: Comm | None, members: Sequence[ProgramInstr]) -> None:
        """Sum gradients over replicas, or over the copies of a tied parameter."""
        given: dict[int, Terms] = {}
        abouts: dict[int, Value] = {}
        buckets: dict[int, str] = {}
        for member in members:
            ins = member.ins
            bucket = self.state.gradient_bucket(ins.writes[0]) if len(ins.writes) == 1 else None
            named = bucket is not None and ins.bucket in (bucket.name, *bucket.siblings)
            here = bucket is not None and named and self.state.is_on(member.program, bucket)
            if bucket is None or not here or ins.reads not in ((), ins.writes):
                read, written = ", ".join(ins.reads), ", ".join(ins.writes)
                self.state.complain(member, f"sums {read} into {written} for {ins.bucket}")
                return
            buckets[member.program] = bucket.name
            wanted: Value = (self.state.expected.weights(bucket.name), HELD[ins.writes[0].kind], ())
            abouts[member.program] = wanted
            terms = self._terms_read(member, ins.reads, wanted)
            if terms is None:
                return
            given[member.program] = terms
        if len(set(abouts.values())) > 1:
            different = "gradients of different parameters, or shards with whole ones"
            self.state.complain(members[0], f"sums {different}")
            return
        sharded = next(iter(abouts.values()))[1] == "owned"
        if comm is not None and sharded and not self._shards_align(comm.name, tuple(buckets.items())):
            self.state.complain(members[0], "sums shards of different elements")
            return
        for member, terms in zip(members, self.summed(comm, members, given), strict=True):
            value = (*abouts[member.program][:2], terms)
            member.slots[member.ins.writes[0]] = value

    @once
    def _shards_align(self, comm: str, buckets: tuple[tuple[int, str], ...]) -> bool:
        """Return whether the devices of each group own the same elements of a tied parameter.

        buckets: that of each program.
        """
        plans, rank = self.state.plans, dict[int, int]()
        for program, name in buckets:
            mine = set(plans.plans[program].devices)
            for group in plans.buckets[name].groups:
                rank |= {device: i for i, device in enumerate(group) if device in mine}
        return all(len({rank.get(d) for d in group}) == 1 for group in plans.comms[comm].groups)

    def reduce_scatter(self, comm: Comm | None, members: Sequence[ProgramInstr]) -> None:
        """Sum gradients over replicas. Each replica adds its shard of the sum to its shard so far.

        Rows of an expert count as its owner's, wherever they are computed. So where the gradients of clones
        come back to their owner, it keeps its terms.
        """
        given: dict[int, Terms] = {}
        returned = False
        for member in members:
            ins, bucket = member.ins, self.bucket_of(member)
            read = ins.reads[:1] if ins.reads[:1] != ins.writes else ()  # nothing: it has nothing to add
            steps = [how for how in bucket.reductions if how.gives != how.gets] if bucket else []
            kinds = [slot.kind for slot in ins.writes]
            step = next((how for how in steps if bucket and [bucket.gradient(how.gets).kind] == kinds), None)
            if bucket is None or step is None or ins.reads[len(read) :] not in ((), ins.writes):
                given_by, written = ", ".join(ins.reads), ", ".join(ins.writes)
                self.state.complain(member, f"scatters {given_by} into {written} for {ins.bucket!r}")
                return
            self._check_members(member, comm, bucket, step)
            returned = bool(bucket.cloned(step))
            wanted: Value = (self.state.expected.weights(bucket.name), step.gives, ())
            terms = self._terms_read(member, read, wanted)
            if terms is None:
                return
            given[member.program] = terms
        sums = [given[m.program] for m in members] if returned else self.summed(comm, members, given)
        for member, terms in zip(members, sums, strict=True):
            slots, ins = member.slots, member.ins
            bucket = self.state.plans.buckets[ins.bucket]
            wanted = (self.state.expected.weights(bucket.name), HELD[ins.writes[0].kind], ())
            if ins.reads[-1:] == ins.writes:
                before = self._terms_read(member, ins.writes, wanted)
                if before is None:
                    return
                terms = self.state.merged(before, terms)
            slots[ins.writes[0]] = (*wanted[:2], terms)

    def reshard(self, comm: Comm | None, member: ProgramInstr) -> None:
        """Bring complete gradients to the devices that update in full, or updated parameters back."""
        ins, name, bucket = member.ins, member.ins.bucket, self.bucket_of(member)
        if bucket is None or not bucket.slices:
            self.state.complain(member, f"reshards {name!r}, of which this device updates none in full")
            return
        if comm is None:
            self.state.complain(member, f"has no communicator; {bucket.slice_count} devices have slices")
        else:
            self.state.check_groups(member, comm, f"slices of {name}", partial(tuple, bucket.slices))
        slot = param_slot(name)
        if (ins.reads, ins.writes) == ((slot,), (slot,)):
            wanted = self.state.value(SymbolicValue("param", name), IN_FULL)
            if member.slots.get(slot) != wanted:
                self.state.mismatch(member, slot, member.slots.get(slot), wanted)
            member.slots[slot] = self.state.value(SymbolicValue("param", name), resharded_version(bucket))
        elif (ins.reads, ins.writes) == ((bucket.gradient(),), (bucket.applied,)):
            final = self.local.check_final(member, ins.reads[0], bucket)
            member.slots[bucket.applied] = (final[0], IN_FULL, final[2])
        else:
            read, written = ", ".join(ins.reads), ", ".join(ins.writes)
            self.state.complain(member, f"reshards {read} into {written}")

    def _terms_read(self, member: ProgramInstr, read: Sequence[SlotId], wanted: Value) -> Terms | None:
        """Return the terms of the sum that a member reads, if it reads one. None: it is another value."""
        if not read:
            return ()
        value = member.slots.get(read[0])
        if value is None or value[:2] != wanted[:2] or not isinstance(value[2], tuple):
            self.state.mismatch(member, read[0], value, wanted)
            return None
        return value[2]

    def summed(
        self, comm: Comm | None, members: Sequence[ProgramInstr], given: dict[int, Terms]
    ) -> list[Terms]:
        """Return the sum over each group, for each member."""
        if comm is None:
            return [given[member.program] for member in members]
        programs = tuple(member.program for member in members)
        by_amount = grouped((amount, (p, cover)) for p in programs for cover, amount in given[p])
        sums: dict[int, list[tuple[int, Amount]]] = {program: [] for program in programs}
        for amount, contributors in by_amount.items():
            covers = self.covers.summed(comm.name, tuple(contributors), programs)
            for program in programs:
                sums[program].append((covers[program], amount))
        return [self.state.merged(tuple(sums[program])) for program in programs]

    def total(self, comm: Comm | None, member: ProgramInstr) -> None:
        """Sum norms, losses and weights over all devices."""
        wanted = self.state.value(SymbolicValue("norm"))
        everyone = self.spec.devices
        slots, ins = member.slots, member.ins
        value = slots.get(ins.reads[0]) if len(ins.reads) == 1 else None
        if value != wanted:
            self.state.mismatch(member, ", ".join(ins.reads), value, wanted)
        if comm is None and len(everyone) > 1:
            self.state.complain(member, "sums over one device; it should sum over all")
        if comm is not None:
            self.state.check_groups(member, comm, "all", lambda: (everyone,))
        if ins.writes != (TOTAL,):
            self.state.complain(member, f"writes {', '.join(ins.writes)}; it should write {TOTAL}")
        slots[TOTAL] = self.state.value(SymbolicValue("total"), "fresh")

    def broadcast(self, comm: Comm | None, member: ProgramInstr) -> None:
        """Broadcast the first replica's buffers to the others."""
        slots, ins = member.slots, member.ins
        if ins.reads != ins.writes or comm is None:
            self.state.complain(member, "gives other slots than it takes, or has no communicator")
            return
        for slot in ins.writes:
            value = slots.get(slot)
            symbol = None if value is None else self.symbols.symbol(value)
            writers = [c for c in self.spec.outline.chunks if symbol and symbol.name in c.mutated]
            if value is None or symbol is None or symbol.kind != "buffer" or not writers:
                contents = f"gives away {slot}, which holds {self.symbols.describe(value)}"
                self.state.complain(member, f"{contents}; it should be a buffer that is written")
                continue
            # Buffers that a chunk writes are never sharded: all its devices hold the same.
            replicas = partial(tuple, [self.spec.placement[writers[0].name]])
            self.state.check_groups(member, comm, f"replicas {writers[0].name}", replicas)
            slots[slot] = (value[0], "first", value[2])

    def _check_members(
        self, member: ProgramInstr, comm: Comm | None, bucket: Bucket, how: ShardCollective
    ) -> None:
        if comm is not None:
            self.state.check_groups(member, comm, f"bucket {bucket.name} {how.among}", lambda: how.groups)
