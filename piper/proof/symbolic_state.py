"""The symbolic state of all programs: the contents of each slot, and the problems of plans."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper.ir.chunk import Output, Tags
from piper.ir.devices import Devices, show
from piper.ir.ids import SlotId
from piper.ir.mesh import axis_through
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans
from piper.proof.covers import Cells, Cover, Covers, once
from piper.proof.expected import Expectations
from piper.proof.specification import Specification
from piper.proof.symbolic_values import (
    IN_FULL,
    NOTHING,
    Amount,
    Amounts,
    SymbolicValue,
    SymbolTable,
    Terms,
    Value,
    places_along,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramInstr:
    """An instruction of a program, at its place in the plan."""

    program: int
    place: int
    ins: Instr
    slots: dict[SlotId, Value]  # of its program


class SymbolicState:
    """The contents of every slot of every program during the symbolic run."""

    def __init__(self, plans: Plans, spec: Specification) -> None:
        self.plans, self.spec = plans, spec
        self.amounts = Amounts()
        self.covers = Covers(plans, spec.cells, spec.shares)
        self.symbols = SymbolTable(self.amounts)
        self._layouts = [Expectations(plans, spec, each, self.covers, self.symbols) for each in spec.layouts]
        self._by_part = {part: each for each in self._layouts for part in each.parts}
        self.expected = self._layouts[0]  # for what is the same in all layouts
        self.problems: list[str] = []
        self.initial = [{slot: self._resident(plan, slot) for slot in plan.residents} for plan in plans]
        self.slots = [dict(residents) for residents in self.initial]
        self.histories: list[tuple[int, str]] = [(0, "")]  # of buffers: what was there before, who wrote
        self._members = {name: frozenset(bucket.devices) for name, bucket in plans.buckets.items()}
        self._same_groups: dict[tuple[str, str], bool] = {}

    def _resident(self, plan: Plan, slot: SlotId) -> Value:
        """Return the value of a slot that outlives a step, when the step begins."""
        bucket = self.plans.buckets.get(slot.owner)
        match slot.kind:
            case "place" | "host_place" if (places := placed_by(slot, plan.devices)) is not None:
                return self.value(SymbolicValue(slot.kind, names=places))
            case _ if plan.residents[slot].host:
                return self.value(SymbolicValue("host", slot), "old")
            case "seed":
                return self.value(SymbolicValue("seed"))
            case "total":
                return self.value(SymbolicValue("total"), "stale")
            case "param" if bucket is not None:
                return self.value(SymbolicValue("param", bucket.name), updated_versions(bucket)[0])
            case "buffer":
                return self.value(SymbolicValue("buffer", slot.owner), "own")
            case "constant":
                return self.value(SymbolicValue("constant", slot.owner))
        return self.value(SymbolicValue("resident", slot))

    def expected_at(self, part: Tags) -> Expectations:
        """Return what instructions on a microbatch must read and write."""
        return self._by_part.get(part, self.expected)

    def sum_of(self, program: int, source: Output) -> Terms | None:
        """Return the sum of losses or weights that a program must hold. None: it has none."""
        sums = [terms for each in self._layouts if (terms := each.sum_of(program, source)) is not None]
        return self.merged(*sums) if sums else None

    def value(self, symbol: SymbolicValue, about: str = "", amount: int | Terms = NOTHING) -> Value:
        """Return a value that has no microbatch."""
        return self.symbols.number(symbol), about, amount

    def instr(self, program: int, place: int) -> ProgramInstr:
        """Return the instruction at a place of a program."""
        ins = self.plans.plans[program].instrs[place]
        return ProgramInstr(program=program, place=place, ins=ins, slots=self.slots[program])

    def complain(self, at: ProgramInstr, what: str) -> None:
        """Note a problem at an instruction."""
        plan = self.plans.plans[at.program]
        self.problems.append(f"{at.ins.node} {what}\n{plan.around(at.place)}")

    def mismatch(self, at: ProgramInstr, slot: str, value: Value | None, wanted: Value) -> None:
        """Note that an instruction reads a wrong value."""
        holds, should = self.symbols.describe(value), self.symbols.describe(wanted)
        if holds == should and value is not None:
            details = (self._details(at.program, each) for each in (value, wanted))
            pairs = list(zip(*details, strict=True))
            holds, should = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        self.complain(at, f"reads {slot}, which holds {holds}; it should hold {should}")

    def _details(self, program: int, value: Value) -> Iterator[str]:
        """Describe a value on each device of a program: by its contributions, or by its samples."""
        symbol, described = self.symbols.symbol(value), self.symbols.describe(value)
        for place, device in enumerate(self.plans.plans[program].devices):
            if isinstance(value[2], tuple):
                yield self.contributions(place, value[2])
            elif symbol.cover < 0:
                yield f"{described} ({value[1]} {value[2]})"
            else:
                cells = show_cells(self.covers.on_devices(symbol.cover)[place])
                yield f"{described}, on device {device} of {cells}"

    def contributions(self, place: int, terms: Terms) -> str:
        """Describe the contributions of a sum on one device of a program."""
        shown = []
        for cover, amount in terms:
            cells = show_cells(self.covers.on_devices(cover)[place])
            counted = sorted(self.amounts.contributions(amount).items())
            some = " + ".join(label if n == 1 else f"{n} x {label}" for label, n in counted[:8])
            shown.append(f"({some}{' + ...' if counted[8:] else ''}) over {cells}")
        return " and ".join(shown) or "nothing"

    def merged(self, *terms: Terms) -> Terms:
        """Return the sum of sums."""
        sums: dict[Cover, Amount] = {}
        for cover, amount in (term for some in terms for term in some):
            sums[cover] = self.amounts.add(sums.get(cover, NOTHING), amount)
        return tuple(sorted(sums.items()))

    @once
    def equal(self, program: int, left: Terms, right: Terms) -> bool:
        """Return whether two sums hold the same contributions on every device of a program."""
        devices = range(len(self.plans.plans[program].devices))
        return left == right or all(self._by_cell(left, i) == self._by_cell(right, i) for i in devices)

    def _by_cell(self, terms: Terms, place: int) -> list[tuple[int, int, Amount]]:
        """Return what a sum holds on one device, for each range of cells."""
        segments = [
            (*segment, amount) for cover, amount in terms for segment in self.covers.on_devices(cover)[place]
        ]
        edges = sorted({edge for low, high, _, _ in segments for edge in (low, high)})
        steps: list[tuple[int, int, Amount]] = []
        for low, high in pairwise(edges):
            total = NOTHING
            for first, last, count, amount in segments:
                if first <= low and high <= last:
                    total = self.amounts.add(total, self.amounts.times(amount, count))
            if steps and steps[-1][1] == low and steps[-1][2] == total:
                steps[-1] = (steps[-1][0], high, total)
            elif total:
                steps.append((low, high, total))
        return steps

    @once
    def written(self, history: int, writer: str) -> int:
        """Return the history of a buffer after one more write."""
        self.histories.append((history, writer))
        return len(self.histories) - 1

    def writers(self, history: int) -> list[str]:
        """Return the instructions that wrote a buffer, first to last."""
        names: list[str] = []
        while history:
            history, writer = self.histories[history]
            names.append(writer)
        return names[::-1]

    def gradient_bucket(self, slot: SlotId) -> Bucket | None:
        """Return the bucket whose summed gradients a slot holds. None: it is another kind of slot."""
        return self.plans.buckets.get(slot.owner) if slot.kind in ("grad", "grad_shard") else None

    def is_on(self, program: int, bucket: Bucket) -> bool:
        """Return whether a bucket lies on a program's devices."""
        return self.plans.plans[program].devices[0] in self._members[bucket.name]

    @once
    def trained_on(self, program: int) -> Mapping[str, Bucket]:
        """Return the trained buckets on a program's devices, by name."""
        return {
            name: bucket
            for name, bucket in self.plans.buckets.items()
            if self.is_on(program, bucket) and any(p.name in self.spec.contributors for p in bucket.pieces)
        }

    def check_groups(
        self, at: ProgramInstr, comm: Comm, whose: str, wanted: Callable[[], Sequence[Devices]]
    ) -> None:
        """Complain where a communicator joins other devices than it should, or in another order."""
        key = (comm.name, whose)
        if key not in self._same_groups:
            self._same_groups[key] = sorted(comm.groups) == sorted(wanted())
        if not self._same_groups[key]:
            groups, should = (" and ".join(map(show, some[:4])) for some in (comm.groups, wanted()))
            self.complain(at, f"goes over {comm.name}, groups {groups}; it should be {should}")


def updated_versions(bucket: Bucket) -> tuple[str, str, str]:
    """Return the versions of what a device holds of a bucket: before and after its update, and at the end."""
    shard = " shard" if bucket.gather_for_use else ""
    updated = IN_FULL if bucket.slices else resharded_version(bucket)
    return f"old{shard}", updated, f"new{shard}"


def resharded_version(bucket: Bucket) -> str:
    """Return the version of what a device holds of a bucket when it has its own shard of the updated one."""
    shard = " shard" if bucket.gather_for_use else ""
    return f"{'partly ' if bucket.gather_updated else ''}new{shard}"


def show_cells(cells: Cells) -> str:
    """Describe the cells that something holds: those of a second shard follow the last cell of the first."""
    ranges = [f"{low}-{high - 1}" + (f" {n} times" if n > 1 else "") for low, high, n in cells]
    return f"cells {', '.join(ranges)}" if ranges else "no cells"


def placed_by(slot: SlotId, devices: Devices) -> tuple[str, ...] | None:
    """Return the positions of devices that a slot states, as the runtime reads it. None: it states none.

    The slot names the set, and one group of it, whose devices say how far apart those of every group lie.
    """
    if len(slot.devices) != 2:
        return None
    region, group = slot.devices
    if not group or not set(region).issuperset((*group, *devices)):
        return None
    axis = axis_through(region, group)
    return places_along(region, axis, devices) if axis.stride > 0 else None
