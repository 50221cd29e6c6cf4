"""The effect on symbolic values of instructions that need no other device."""

from collections.abc import Callable

from piper.ir.ids import TOTAL, SlotId, param_slot, show_part, state_slot
from piper.plan.bucket import Bucket
from piper.plan.ops import OPS, Op, Payload, Rows
from piper.plan.text import show_payload
from piper.proof.expected import Expected
from piper.proof.specification import in_any_order
from piper.proof.symbolic_state import ProgramInstr, SymbolicState, updated_versions
from piper.proof.symbolic_values import IN_FULL, NO_COVER, NOTHING, SymbolicValue, Value, shown_cuts

Kernel = Callable[[ProgramInstr], None]


def described(payload: Payload) -> str:
    """Describe what an instruction is about, as its line does."""
    return " ".join(show_payload(payload)) or "nothing"


class LocalRules:
    """Runs the instructions of one program that need no other program."""

    def __init__(self, state: SymbolicState) -> None:
        self.state = state
        self.spec, self.symbols, self.covers = state.spec, state.symbols, state.covers
        self.on_host = {  # the values of copies, by program and slot
            (program, slot): state.value(SymbolicValue("state", slot.owner), "old")
            for program, plan in enumerate(state.plans)
            for slot in plan.residents
            if self.plan_host(program, slot)
        }
        self.terms: dict[int, set[tuple[str, Value | None]]] = {}  # that programs add to sums by name
        self.kernels: dict[Op, Kernel] = {
            **{op: self.copy for op, operation in OPS.items() if operation.unchanged},
            "load": self.load,
            "compute": self.compute,
            "concat": self.concat,
            "add": self.add,
            "accumulate": self.accumulate,
            "norm": self.norm,
            "update": self.update,
            "protect": self.protect,
            "offload": self.offload,
            "fetch": self.fetch,
        }

    def load(self, at: ProgramInstr) -> None:
        """Load a field of the batch, for a microbatch, on a slice of the samples."""
        taken = at.ins.loads
        cover = self.covers.of_set(at.program, taken.devices, taken.degree)
        if cover is None:
            self.state.complain(at, "loads the samples of devices that it does not run on")
            return
        if any(self.spec.axes.get(axis, 0) <= index for axis, index in taken.part):
            self.state.complain(at, f"loads a microbatch that does not exist, {taken.part}")
        here = self.state.plans.plans[at.program].devices
        cuts = shown_cuts(in_any_order(taken.slices), taken.devices, here)
        symbol = SymbolicValue("batch", taken.name, 0, cover, cuts)
        self._write(at, ((self.symbols.number(symbol), taken.part, NOTHING),))

    def compute(self, at: ProgramInstr) -> None:
        """Run a phase of a chunk: check everything that it reads, and write its results."""
        run = at.ins.computes
        expected = self.state.expected_at(run.part).of_phase(at.program, run.chunk, run.phase)
        if expected is None:
            self.state.complain(at, f"has {described(run)}, which this device must not run")
            return
        self.follow(at, expected)
        in_place = self.spec.chunks[run.chunk].phases[run.phase].in_place
        for slot in at.ins.adds_to:
            bucket = self.state.plans.buckets.get(slot.owner)
            if bucket is None or not any(piece.name in in_place for piece in bucket.pieces):
                self.state.complain(at, f"adds to {slot}, which its code cannot")
        if run.phase == "F" and run.again and expected.mutated:
            self.state.complain(at, "runs a second time and writes buffers a second time")

    def protect(self, at: ProgramInstr) -> None:
        """Copy a part of the state: as the step began with it, or it is a state that never was."""
        begun = self.state.initial[at.program]
        for slot in at.ins.reads:
            if slot not in begun or at.slots.get(slot) != begun[slot]:
                contents = self.symbols.describe(at.slots.get(slot))
                self.state.complain(at, f"copies {slot}, which holds {contents}; the step wrote it")
        for slot in at.ins.writes:
            at.slots[slot] = self.state.value(SymbolicValue("copy", slot.owner))

    def offload(self, at: ProgramInstr) -> None:
        """Copy values to the host, and the updated state of buckets to its place there."""
        slots, ins = at.slots, at.ins
        if len(ins.reads) != len(ins.writes):
            self.state.complain(at, f"makes {len(ins.writes)} copies of {len(ins.reads)} values")
        for read, written in zip(ins.reads, ins.writes, strict=False):
            if read not in slots:
                self.state.complain(at, f"copies {read}, which holds nothing")
                continue
            version = "new" if self.plan_host(at.program, written) else ""
            updated = self.state.value(SymbolicValue("state", written.owner), version)
            if version and slots[read] != updated:
                contents = self.symbols.describe(slots[read])
                self.state.complain(at, f"copies {contents} to the host, as {written}")
            self.on_host[at.program, written] = slots[read]
            slots[written] = self.state.value(SymbolicValue("host", written), version)

    def fetch(self, at: ProgramInstr) -> None:
        """Bring copies back from the host, each as the value that it is of, and state only once."""
        slots, ins = at.slots, at.ins
        states = tuple(slot for slot in ins.reads if self.plan_host(at.program, slot))
        if len(ins.writes) != len(ins.reads) + len(states) or ins.writes[len(ins.reads) :] != states:
            self.state.complain(at, f"brings {len(ins.reads)} copies as {len(ins.writes)}")
        for read, written in zip(ins.reads, ins.writes, strict=False):
            version = "old" if read in states else ""
            if slots.get(read) == self.state.value(SymbolicValue("host", read), version):
                slots[written] = self.on_host[at.program, read]
            else:
                contents = self.symbols.describe(slots.get(read))
                self.state.complain(at, f"brings {read}, which holds {contents}, from the host")
        for slot in states:
            slots[slot] = self.state.value(SymbolicValue("host", slot), "outdated")

    def plan_host(self, program: int, slot: SlotId) -> int:
        """Return the bytes of a resident slot that are on the host."""
        residents = self.state.plans.plans[program].residents
        return residents[slot].host if slot in residents else 0

    def follow(self, at: ProgramInstr, expected: Expected) -> None:
        """Check an instruction on a chunk against its expectation, and write its results."""
        part = at.ins.part
        if part not in self.spec.part_devices[expected.chunk]:
            self.state.complain(at, f"runs on a microbatch that does not exist, {part}")
        self.check_reads(at, expected)
        values: list[Value] = [(n, part if s is None else s, a) for n, s, a in expected.writes]
        for weights, cover, suffix in expected.weights:
            amount = self.state.expected.single(expected.chunk, part, suffix)
            values.append((weights, "whole", ((cover, amount),)))
            slot = at.ins.writes[len(values) - 1] if len(values) <= len(at.ins.writes) else None
            if slot in at.ins.adds_to:
                values[-1] = self._added(at, slot, values[-1])
        for name in expected.mutated:
            symbol = self.symbols.number(SymbolicValue("buffer", name))
            before = self._buffer(at, symbol)
            writer = f"{expected.chunk}{show_part(part)}"
            values.append((symbol, "own", self.state.written(before, writer)))
        self._write(at, tuple(values))

    def check_reads(self, at: ProgramInstr, expected: Expected) -> None:
        """Complain about every read of a wrong value."""
        part = at.ins.part
        wanted: list[Value] = [(n, part if s is None else s, a) for n, s, a in expected.reads]
        sums = at.ins.adds_to
        reads = [slot for slot in at.ins.reads if slot not in sums]
        values = [at.slots.get(slot) for slot in reads]
        if values == wanted:
            return
        if len(values) != len(wanted):
            self.state.complain(at, f"reads {len(values)} slots; it should read {len(wanted)}")
            return
        for i, (slot, value, should) in enumerate(zip(reads, values, wanted, strict=True)):
            if value is not None and i in expected.buffers and value[0] == should[0]:
                continue  # a buffer that changes during the step: as it is
            if value is not None and i in expected.sample_independent:
                value, should = self.symbols.without_samples(value), self.symbols.without_samples(should)
            if value != should:
                self.state.mismatch(at, slot, values[i], wanted[i])

    def _buffer(self, at: ProgramInstr, symbol: int) -> int:
        """Return the history of a buffer that an instruction reads before it writes it."""
        for slot in (*at.ins.reads, *at.ins.writes):
            value = at.slots.get(slot)
            if value is not None and value[0] == symbol and isinstance(value[2], int):
                return value[2]
        return 0

    def sent(self, at: ProgramInstr) -> Value | None:
        """Return the rows of a value that a send or a copy takes. None: there is no such value."""
        if len(at.ins.reads) != 1:
            self.state.complain(at, f"reads {len(at.ins.reads)} slots; it should read 1")
            return None
        value = at.slots.get(at.ins.reads[0])
        rows = at.ins.payload
        if value is None or not isinstance(rows, Rows) or rows == Rows(start=0, stop=1, of=1):
            return value
        cover = self.symbols.symbol(value).cover
        part = self.covers.cut(cover, rows.start, rows.stop, rows.of) if cover != NO_COVER else None
        if part is None:
            what = self.symbols.describe(value)
            self.state.complain(at, f"takes {described(rows)} of {what}, which cannot be cut there")
            return None
        return (self.symbols.moved(value[0], part), *value[1:])

    def copy(self, at: ProgramInstr) -> None:
        """Copy a value, or some of its rows, to another slot."""
        value = self.sent(at)
        if value is not None:
            self._write(at, (value,))

    def concat(self, at: ProgramInstr) -> None:
        """Join neighbouring pieces of one value."""
        values = [value for slot in at.ins.reads if (value := at.slots.get(slot)) is not None]
        pieces = set(map(self.symbols.without_samples, values))
        covers = tuple(self.symbols.symbol(value).cover for value in values)
        alike = len(values) == len(at.ins.reads) and len(pieces) == 1 and NO_COVER not in covers
        cover = self.covers.joined(covers) if alike else None
        if cover is None:
            given = ", ".join(map(self.symbols.describe, values))
            self.state.complain(at, f"joins what are not neighbouring pieces of one value: {given}")
            return
        first = values[0]
        self._write(at, ((self.symbols.moved(first[0], cover), *first[1:]),))

    def add(self, at: ProgramInstr) -> None:
        """Sum gradients of one value from two of its readers."""
        values = [at.slots.get(slot) for slot in at.ins.reads]
        if len(values) == 2 and values[0] is not None and values[1] is not None:
            left, right = values[0], values[1]
            kind = self.symbols.symbol(left).kind
            if kind == "gradient" and left[:2] == right[:2]:
                assert isinstance(left[2], int) and isinstance(right[2], int)
                total = self.state.amounts.add(left[2], right[2])
                self._write(at, ((left[0], left[1], total),))
                return
        given = " and ".join(map(self.symbols.describe, values))
        self.state.complain(at, f"adds what are not gradients of one value: {given}")

    def accumulate(self, at: ProgramInstr) -> None:
        """Start a sum of gradients, losses or weights, or add to it."""
        state = self.state
        again = at.ins.reads[1:]
        if not at.ins.reads or len(at.ins.writes) != 1 or again not in ((), at.ins.writes):
            state.complain(at, "adds to another slot than it writes")
            return
        value = at.slots.get(at.ins.reads[0])
        given = None if value is None else self._accumulated(value, at.ins.writes[0])
        if given is None:
            contents = f"which holds {state.symbols.describe(value)}"
            state.complain(at, f"adds {at.ins.reads[0]}, {contents}, to {at.ins.writes[0]}")
            return
        if again:
            given = self._added(at, again[0], given)
        self._write(at, (given,))

    def _added(self, at: ProgramInstr, slot: SlotId, given: Value) -> Value:
        """Return the sum of what a slot holds and a term, or complain that they are no terms of one sum."""
        before = at.slots.get(slot)
        if before is None or before[:2] != given[:2]:
            self.state.mismatch(at, slot, before, given)
            return given
        assert isinstance(before[2], tuple) and isinstance(given[2], tuple)
        return (*given[:2], self.state.merged(before[2], given[2]))

    def _accumulated(self, value: Value, slot: SlotId) -> Value | None:
        """Return a value as a term of the sum in a slot. None: it does not belong there."""
        symbol = self.symbols.symbol(value)
        bucket = self.state.gradient_bucket(slot)
        if bucket is not None:
            wanted = (self.state.expected.weights(bucket.name), "whole")
            return value if value[:2] == wanted else None
        source = self.spec.microbatch_sums.get(slot)
        of = (symbol.kind, symbol.name, symbol.index)
        if source is None or of != ("output", source.chunk, source.index):
            return None
        assert not isinstance(value[1], str)
        amount = self.state.expected.single(source.chunk, value[1])
        return self.state.value(SymbolicValue("sum", slot), "", ((symbol.cover, amount),))

    def norm(self, at: ProgramInstr) -> None:
        """Compute a device's part of the squared norm, and its sums: each gradient once, complete."""
        state = self.state
        left: dict[SlotId, Value] = {}
        for name, source in self.spec.microbatch_sums.items():
            terms = state.sum_of(at.program, source)
            if terms is not None:
                left[name] = state.value(SymbolicValue("sum", name), "", terms)
        buckets = dict(state.trained_on(at.program))
        terms_left = self.terms.pop(at.program, set())
        for slot in at.ins.reads:
            bucket = state.gradient_bucket(slot)
            if bucket is not None and bucket.name in buckets:
                self.check_final(at, slot, buckets.pop(bucket.name))
            elif slot in left:
                self._check_sum(at, slot, left.pop(slot))
            elif (term := (slot.sum_name, state.slots[at.program].get(slot))) in terms_left:
                terms_left.remove(term)
            else:
                state.complain(at, f"counts {slot} twice, or should not count it")
        for missing in (*buckets, *left, *(self.symbols.describe(value) for _, value in terms_left)):
            state.complain(at, f"leaves out {missing}")
        self._write(at, (state.value(SymbolicValue("norm")),))

    def check_final(self, at: ProgramInstr, slot: SlotId, bucket: Bucket, *, full: bool = False) -> Value:
        """Return a bucket's complete gradient, of its shard, or in full; complain unless a slot holds it."""
        terms = self.state.expected.final_gradient(at.program, bucket.name)
        about = IN_FULL if full else "owned" if bucket.zero else "whole"
        final = (self.state.expected.weights(bucket.name), about, terms)
        self._check_sum(at, slot, final)
        return final

    def _check_sum(self, at: ProgramInstr, slot: SlotId, should: Value) -> None:
        value = at.slots.get(slot)
        if value is not None and value[:2] == should[:2]:
            assert isinstance(value[2], tuple) and isinstance(should[2], tuple)
            if self.state.equal(at.program, value[2], should[2]):
                return
        self.state.mismatch(at, slot, value, should)

    def update(self, at: ProgramInstr) -> None:
        """Step the optimizer: each bucket once, with its own complete gradient."""
        state = self.state
        buckets = {param_slot(name): bucket for name, bucket in state.trained_on(at.program).items()}
        total = at.slots.get(TOTAL)
        if any(each.steers for each in self.spec.sums):
            fresh = state.value(SymbolicValue("total"), "fresh")
            if TOTAL not in at.ins.reads:
                state.complain(at, "does not read the sums over all devices, by which it scales")
            elif total != fresh:
                state.mismatch(at, TOTAL, total, fresh)
        given = [slot for slot in at.ins.reads if slot != TOTAL and slot.kind != "fetched"]
        params = [slot for slot in at.ins.writes if slot.kind != "fetched"]
        if len(given) != len(params):
            state.complain(at, f"updates {len(params)} buckets by {len(given)} gradients")
            return
        for slot, written in zip(given, params, strict=True):
            bucket = buckets.get(written)
            if bucket is None:
                state.complain(at, f"updates {written}, which this device must not train")
                continue
            self.check_final(at, slot, bucket, full=bool(bucket.slices))
            before, after, _ = updated_versions(bucket)
            symbol = SymbolicValue("param", bucket.name)
            if at.slots.get(written) != state.value(symbol, before):
                contents = self.symbols.describe(at.slots.get(written))
                state.complain(at, f"updates {written}, which holds {contents}, a second time")
            at.slots[written] = state.value(symbol, after)
            at.slots[slot] = state.value(SymbolicValue("spent"))
            if self.plan_host(at.program, state_slot(bucket.name)):
                self._update_state(at, bucket.name)

    def _update_state(self, at: ProgramInstr, bucket: str) -> None:
        """Update the state of a bucket, which the host has given to the device."""
        old, new = (self.state.value(SymbolicValue("state", bucket), about) for about in ("old", "new"))
        brought = [slot for slot in at.ins.reads if at.slots.get(slot) == old and slot in at.ins.writes]
        if len(brought) != 1:
            self.state.complain(at, f"updates {bucket} without its state, which is on the host")
        at.slots.update(dict.fromkeys(brought, new))

    def _write(self, at: ProgramInstr, values: tuple[Value, ...]) -> None:
        if len(values) != len(at.ins.writes):
            should = f"it should write {len(values)}"
            self.state.complain(at, f"writes {len(at.ins.writes)} slots; {should}")
            return
        at.slots.update(zip(at.ins.writes, values, strict=True))
