"""Checks that groups which train apart are copies of each other, and meet in averages alone.

Then what is proven of the first group holds for each: the other groups run its instructions on their own
samples, and nothing that a group reads comes from another one but averages.
"""

from collections.abc import Callable, Iterator

from piper.ir.averaging import Averaging
from piper.ir.devices import show
from piper.ir.ids import param_slot, state_slot
from piper.plan.bucket import Bucket
from piper.plan.groups import ChangedDevices, of_first_group
from piper.plan.ops import Op
from piper.plan.plan import Plans
from piper.proof.symbolic_state import ProgramInstr, SymbolicState, updated_versions
from piper.proof.symbolic_values import SymbolicValue


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
    """Yield where the plans of the first group, repeated, are not those of all groups.

    averages: the communicators of averages.
    """
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
        self.kernels: dict[Op, Callable[[ProgramInstr], None]] = {
            "average": self.average,
            "merge": self.merge,
        }

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
        bucket = {bucket.name: bucket for bucket in self.state.trained_on(at.program)}.get(owner)
        slots = (*([param_slot(owner)] if params else []), *([state_slot(owner)] if state else []))
        if bucket is None or not at.ins.reads == at.ins.writes == slots:
            read, written = ", ".join(at.ins.reads), ", ".join(at.ins.writes)
            self.state.complain(at, f"averages {read} into {written}; it should average one trained bucket")
            return None
        value = self.state.slots[at.program].get(param_slot(owner))
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
        for bucket in self.state.trained_on(program):
            if not all((op, program, bucket.name) in self.done for op in needed):
                yield f"{bucket.name} is not averaged with other groups"
