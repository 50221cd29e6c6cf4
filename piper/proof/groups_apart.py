"""Checks that groups which train apart are copies of each other, and meet in averages alone.

Then what is proven of the first group holds for each: the other groups run its instructions on their own
samples, and nothing that a group reads comes from another one but averages.
"""

from collections.abc import Iterator

from piper.ir.averaging import Averaging
from piper.ir.devices import show
from piper.ir.ids import param_slot, state_slot
from piper.plan.groups import ChangedDevices, of_first_group
from piper.plan.plan import Plans
from piper.proof.local_rules import UPDATED
from piper.proof.symbolic_state import ProgramInstr, SymbolicState
from piper.proof.symbolic_values import SymbolicValue


def group_problems(plans: Plans, asked: Averaging) -> Iterator[str]:
    """Yield where groups are no copies of each other, and where they communicate but to average."""
    if plans.averaging != asked:
        yield f"the plans say averaging={plans.averaging}; it should be {asked}"
        return
    if sorted(asked.places) != list(plans.devices):
        yield f"the groups have devices {sorted(asked.places)}, the plans {show(plans.devices)}"
        return
    if plans.cells % len(asked.groups):
        yield f"{plans.cells} cells do not divide into {len(asked.groups)} groups"
    averages = {ins.comm for plan in plans for ins in plan.instrs if ins.op == "average"}
    others = {ins.comm for plan in plans for ins in plan.instrs if ins.op != "average"}
    for name, comm in plans.comms.items():
        if name in averages and (name in others or sorted(comm.groups) != sorted(asked.peers)):
            groups = "; ".join(map(show, comm.groups[:4]))
            yield f"averages go over {name}, groups {groups}; it should join the counterparts alone"
    yield from copy_problems(plans, asked, averages)


def copy_problems(plans: Plans, asked: Averaging, averages: set[str | None]) -> Iterator[str]:
    """Yield where the plans of the first group, repeated, are not those of all groups.

    averages: the communicators of averages.
    """
    first = of_first_group(plans, asked)
    again = ChangedDevices(asked.everywhere, asked.copies).all(first, plans.cells)
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
    """Runs averages: each trained bucket once, after its update."""

    def __init__(self, state: SymbolicState) -> None:
        self.state = state
        self.averaged: set[tuple[int, str]] = set()  # programs and the buckets that they average

    def run(self, at: ProgramInstr) -> None:
        """Average what a device trains of a bucket with other groups: once, after its update."""
        buckets = {param_slot(bucket.name): bucket for bucket in self.state.trained_on(at.program)}
        bucket = buckets.get(at.ins.writes[0]) if at.ins.writes else None
        asked = self.state.spec.graph.averaging
        if (
            bucket is None
            or asked is None
            or at.ins.reads != at.ins.writes
            or at.ins.writes[1:] != ((state_slot(bucket.name),) if asked.kept else ())
        ):
            read, written = ", ".join(at.ins.reads), ", ".join(at.ins.writes)
            self.state.complain(at, f"averages {read} into {written}; it should average one trained bucket")
            return
        value = self.state.slots[at.program].get(at.ins.writes[0])
        updated = self.state.value(SymbolicValue("param", bucket.name), UPDATED[bucket.zero][1])
        if value != updated:
            self.state.mismatch(at, at.ins.writes[0], value, updated)
        if (at.program, bucket.name) in self.averaged:
            self.state.complain(at, f"averages {bucket.name} a second time")
        self.averaged.add((at.program, bucket.name))
