"""The proof of values: a symbolic run of all programs together against the specification.

The proof of order (`piper.plan.prove`) shows that every read follows the last write of its slot in issue
order, whatever the streams do. So the value that a read sees is the one last written in issue order, and one
symbolic run in issue order speaks for all real ones. It shows, for every program and so for every device:

- every phase of every chunk reads the outputs, saved values, gradients, parameters and buffers that the
  captured model says, of its own microbatch and its own slice of the samples;
- parameters are those of the last update when read, whole, and every trained one is updated exactly once;
- the gradient that an update applies holds every microbatch of every chunk that uses the parameter, on every
  cell of the samples, exactly once; so do the sums of the loss and of its weight; the norm counts every
  gradient once;
- what a send sends is what the receiver's readers expect; rows go to the devices of their experts and back.

The run takes time linear in the instructions of distinct programs. A device is looked at a few times for each
communicator it is in.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from piper.ir.averaging import Averaging
from piper.ir.devices import show
from piper.ir.graph import Graph
from piper.ir.ids import TOTAL, SlotId, buffer_slot, param_slot, show_part, state_slot
from piper.plan.bucket import Bucket
from piper.plan.groups import ChangedDevices, of_first_group
from piper.plan.ops import COMMUNICATION, OPS, Op
from piper.plan.plan import Comm, Plans
from piper.plan.prove import MOST_PROBLEMS, ProofError, events_of, in_order
from piper.proof.collective_rules import CollectiveRules
from piper.proof.covers import once
from piper.proof.local_rules import Kernel, LocalRules, described
from piper.proof.specification import Specification
from piper.proof.symbolic_state import ProgramInstr, SymbolicState, updated_versions
from piper.proof.symbolic_values import SymbolicValue, Value
from piper.proof.tables import shard_problems, table_problems


def prove_values(plans: Plans, graph: Graph, *, clip: bool = False, whole: bool = False) -> None:
    """Raise ProofError with a counterexample unless plans compute what the graph means.

    The order of the plans must have been proven. `clip`: whether gradients are clipped by their norm.
    `whole`: whether the optimizer needs whole parameters.
    """
    problems = list(value_problems(plans, graph, clip=clip, whole=whole))
    if problems:
        raise ProofError("the plans compute something else:\n" + "\n".join(problems[:MOST_PROBLEMS]))


def value_problems(plans: Plans, graph: Graph, *, clip: bool = False, whole: bool = False) -> Iterator[str]:
    """Yield everything that plans compute wrongly, as far as it can be seen."""
    spec = Specification(graph, clip=clip)
    asked = graph.averaging
    if asked is not None:
        problems = [*group_problems(plans, asked)]
        yield from problems
        if problems:
            return
        plans = of_first_group(plans, asked)
    problems = [*table_problems(plans, spec), *shard_problems(plans, whole)]
    yield from problems
    if not problems:  # else the symbols would mean nothing
        for averages in (True, False) if asked is not None else (True,):  # steps in which they are due or not
            run = SymbolicRun(plans, spec, averages=averages)
            run.run()
            yield from run.state.problems


class SymbolicRun:
    """Runs all programs, each in its issue order, communication being one event on all its members."""

    def __init__(self, plans: Plans, spec: Specification, *, averages: bool = True) -> None:
        self.plans, self.spec = plans, spec
        updates = any(ins.op == "update" for plan in plans for ins in plan.instrs)
        self.averages = averages and updates and spec.graph.averaging is not None
        self.state = SymbolicState(plans, spec)
        self.local, self.groups = LocalRules(self.state), AverageRule(self.state)
        self.collective = CollectiveRules(self.state, self.local)
        apart = self.groups.kernels if averages else dict.fromkeys(self.groups.kernels, lambda at: None)
        take: Kernel = partial(self.collective.collect, None)
        self.kernels = {**self.local.kernels, **apart, "slice": take}

    def run(self) -> None:
        """Run every event, then check what the step leaves behind."""
        events, followers = events_of(self.plans)
        order, stuck = in_order(followers)
        for number in order:
            self.step([self.state.instr(program, place) for program, place in events[number]])
            if len(self.state.problems) >= MOST_PROBLEMS:
                return
        for number in sorted(stuck)[:1]:
            self.state.complain(self.state.instr(*events[number][0]), "waits for what never happens")
        if not self.state.problems:
            for program in range(len(self.plans)):
                self.check_end(program)

    def step(self, members: Sequence[ProgramInstr]) -> None:
        """Run an instruction, or all those of one communication, and free what they free."""
        at, kernel = members[0], self.kernels.get(members[0].ins.op)
        if len(members) > 1 and len({OPS[member.ins.op].name for member in members}) > 1:
            self.state.complain(at, "is another operation on other devices")
        elif unfit := [member for member in members if not member.ins.fits_its_operation]:
            what = described(unfit[0].ins.payload)
            self.state.complain(unfit[0], f"has {what}, which is not what {unfit[0].ins.op} needs")
        elif kernel is None:
            self.communicate(members)
        else:
            for member in members:
                kernel(member)
        for member in members:
            self.finish(member)

    def finish(self, at: ProgramInstr) -> None:
        """Free what an instruction frees."""
        for slot in at.ins.frees:
            at.slots.pop(slot, None)

    def communicate(self, members: Sequence[ProgramInstr]) -> None:
        """Run a transfer, or a collective of all members of its communicator."""
        at = members[0]
        op, comm = at.ins.op, None if at.ins.comm is None else self.plans.comms[at.ins.comm]
        assert op in COMMUNICATION, op
        if op in ("send", "recv"):
            if comm is None or comm.kind != "pairs":
                self.state.complain(at, f"{op}s over {at.ins.comm}, which joins no pairs")
            else:
                self.transfer(comm, members)
        elif comm is not None and comm.kind != "groups":
            self.state.complain(at, f"goes over {comm.name}, which joins pairs")
        elif comm is not None and self.members(comm.name) != {member.program for member in members}:
            self.state.complain(at, "waits for what never happens")
        else:
            self.collective.meet(comm, members)

    def transfer(self, comm: Comm, members: Sequence[ProgramInstr]) -> None:
        """Send a value, and receive it on the devices at the other end."""
        sent = {member.program: self.local.sent(member) for member in members if member.ins.op == "send"}
        for member in (member for member in members if member.ins.op == "recv"):
            senders = self.state.covers.sending_programs(comm.name, member.program)
            if sent.keys() >= set(senders):
                self.collective.receive(member, comm, {sender: sent[sender] for sender in senders})
            else:
                self.state.complain(member, "waits for what never happens")

    @once
    def members(self, comm: str) -> set[int]:
        """Return the programs that a communicator joins."""
        return {self.state.covers.where[d][0] for group in self.plans.comms[comm].groups for d in group}

    def check_end(self, program: int) -> None:
        """Complain about what a step leaves behind: stale parameters, buffers or sums."""
        state, slots = self.state, self.state.slots[program]
        wanted = dict(state.initial[program])
        wanted[TOTAL] = state.value(SymbolicValue("total"), "fresh")
        state.problems.extend(self.groups.left_out(program) if self.averages else ())
        for bucket in state.trained_on(program).values():
            new = state.value(SymbolicValue("param", bucket.name), updated_versions(bucket)[2])
            wanted[param_slot(bucket.name)] = new
            kept = state_slot(bucket.name)
            if self.local.plan_host(program, kept):
                wanted[kept] = state.value(SymbolicValue("host", kept), "new")
        changing = {buffer_slot(name): name for name in self.spec.mutated}
        for slot, value in wanted.items():
            left = slots.get(slot)
            if slot in changing:
                self.check_buffer(program, slot, changing[slot], left)
            elif left != value:
                self.left_behind(program, slot, state.symbols.describe(left), state.symbols.describe(value))

    def check_buffer(self, program: int, slot: SlotId, name: str, value: Value | None) -> None:
        """Complain unless a buffer has seen the forwards of its device, and then is that of the first."""
        chunks = [chunk.name for chunk in self.spec.outline.chunks if name in chunk.mutated]
        device = self.plans.plans[program].devices[0]
        wanted = [
            f"{chunk}{show_part(part)}"
            for chunk in chunks
            for part in self.spec.microbatches[chunk]
            if device in self.spec.part_devices[chunk][part]
        ]
        writers: list[str] = []
        if value is not None and self.state.symbols.symbol(value) == SymbolicValue("buffer", name):
            assert isinstance(value[2], int)
            writers = self.state.writers(value[2])
        ordered = len(chunks) == 1 and self.spec.in_order(chunks[0])
        if writers != wanted if ordered else Counter(writers) != Counter(wanted):
            wrote, should = (", ".join(some) or "nothing" for some in (writers, wanted))
            self.left_behind(program, slot, f"what {wrote} wrote", f"what {should} write")
        copies = len(self.spec.placement[chunks[0]]) > self.spec.degree(chunks[0])
        if copies and (value is None or value[1] != "first"):
            self.left_behind(program, slot, "the buffer of each replica", "that of the first replica")

    def left_behind(self, program: int, slot: SlotId, contents: str, should: str) -> None:
        """Note the contents of a slot at the end of a step."""
        where = f"{slot} on device {self.plans.plans[program].devices[0]}"
        self.state.problems.append(
            f"at the end of the step {where} holds {contents}; it should hold {should}"
        )


def group_problems(plans: Plans, averaging: Averaging) -> Iterator[str]:
    """Yield where groups are no copies of each other, and where they communicate but to average."""
    if plans.averaging != averaging:
        yield f"the plans say averaging={plans.averaging}; it should be {averaging}"
        return
    if sorted(averaging.places) != list(plans.devices):
        yield f"the groups have devices {sorted(averaging.places)}, the plans {show(plans.devices)}"
        return
    if plans.cells % len(averaging.groups):
        yield f"{plans.cells} cells do not divide into {len(averaging.groups)} groups"
    averages = {ins.comm for plan in plans for ins in plan.instrs if ins.op == "average"}
    others = {ins.comm for plan in plans for ins in plan.instrs if ins.op != "average"}
    for name, comm in plans.comms.items():
        if name in averages and (name in others or sorted(comm.groups) != sorted(averaging.peers)):
            groups = "; ".join(map(show, comm.groups[:4]))
            yield f"averages go over {name}, groups {groups}; it should join the counterparts alone"
    yield from copy_problems(plans, averaging, averages)


def copy_problems(plans: Plans, averaging: Averaging, averages: set[str | None]) -> Iterator[str]:
    """Yield where the plans of the first group, repeated, are not those of all groups, but for averages."""
    first = of_first_group(plans, averaging)
    again = ChangedDevices(averaging.everywhere, averaging.copies).all(first, plans.cells)
    for mine, copied in zip(plans, again, strict=True):
        pairs = zip(mine.instrs, copied.instrs, strict=True)
        unlike = [a.node for a, b in pairs if a.payload != b.payload]
        unlike += ["its devices"] if mine.devices != copied.devices else []
        if unlike:
            yield f"the plan of {show(mine.devices)} differs between groups in {unlike[0]}"
    for kind, here, there in (
        ("bucket", plans.buckets, again.buckets),
        ("chunk", plans.chunks, again.chunks),
        ("comm", {n: c for n, c in plans.comms.items() if n not in averages}, again.comms),
    ):
        for name in here:
            if here[name] != there.get(name):
                yield f"{kind} {name} differs between groups: {here[name]}"


class AverageRule:
    """Runs averages: each trained bucket once, after its update, or merged once into it after it."""

    def __init__(self, state: SymbolicState) -> None:
        self.state, self.averaging = state, state.spec.graph.averaging or Averaging(groups=())
        self.done: set[tuple[Op, int, str]] = set()  # operations, programs and buckets
        self.kernels: dict[Op, Kernel] = {"average": self.average, "merge": self.merge}

    def average(self, at: ProgramInstr) -> None:
        """Average what a device trains of a bucket, or what travels of it, with other groups."""
        overlaps = self.averaging.overlap > 0
        self._check(at, params=not overlaps, state=overlaps or self.averaging.outer_values > 0)

    def merge(self, at: ProgramInstr) -> None:
        """Merge what has travelled, of this step at the latest, into the parameters."""
        bucket = self._check(at, params=True, state=True)
        if bucket is not None and ("average", at.program, bucket.name) not in self.done:
            self.state.complain(at, f"merges {bucket.name} before this step's part of it has travelled")

    def _check(self, at: ProgramInstr, *, params: bool, state: bool) -> Bucket | None:
        """Complain unless an instruction reads and writes one trained bucket, once, after its update."""
        owner = at.ins.writes[0].owner if at.ins.writes else ""
        bucket = self.state.trained_on(at.program).get(owner)
        slots = (*([param_slot(owner)] if params else []), *([state_slot(owner)] if state else []))
        if bucket is None or not at.ins.reads == at.ins.writes == slots:
            read, written = ", ".join(at.ins.reads), ", ".join(at.ins.writes)
            self.state.complain(at, f"averages {read} into {written}; it should average one trained bucket")
            return None
        value = at.slots.get(param_slot(owner))
        updated = self.state.value(SymbolicValue("param", owner), updated_versions(bucket)[1])
        if params and value != updated:
            self.state.mismatch(at, param_slot(owner), value, updated)
        if (at.ins.op, at.program, owner) in self.done:
            self.state.complain(at, f"averages {owner} a second time")
        self.done.add((at.ins.op, at.program, owner))
        return bucket

    def left_out(self, program: int) -> Iterator[str]:
        """Yield the trained buckets that a program does not average, or does not merge."""
        needed: tuple[Op, ...] = ("average", "merge") if self.averaging.overlap else ("average",)
        for name in self.state.trained_on(program):
            if not all((op, program, name) in self.done for op in needed):
                yield f"{name} is not averaged with other groups"
