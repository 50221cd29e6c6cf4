"""The proof that a plan uses its slots rightly: written before read, freed once, after the last use.

And that no stream runs ahead so far that memory exceeds what the order of issue says, or that receives take
multiprocessors from computations that do not need them.
"""

from bisect import bisect_left

from piper.ir.ids import SlotId
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.plan.plan import Plan

Reach = dict[str, int]  # stream -> the last of its instructions that is known to be over


class SlotProof:
    """Walks a plan in issue order, with what each stream knows of the others by the events it waited for.

    It shares no code with `StreamClock`, by which plans get their events: a proof must not repeat a mistake.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problems: list[str] = []
        self._known: dict[str, Reach] = {}  # by stream
        self._signalled: dict[int, tuple[str, int, Reach]] = {}  # event -> stream, place, what it knew then
        self._written: dict[SlotId, int] = {}
        self._freed: dict[SlotId, int] = {}
        self._touched: dict[SlotId, Reach] = {}  # slot or shared storage -> the last use by each stream
        self._sharers: dict[SlotId, int] = {}  # storage -> how many live slots share it
        self._shares = {name: [s for s, _ in slot.shares] for name, slot in plan.slots.items() if slot.shares}
        self._scattered = {slot for ins in plan.instrs if ins.op == "reduce_scatter" for slot in ins.reads}
        paced: tuple[Op, ...] = ("compute", "update", "reduce_scatter", "offload")
        self._last: dict[Op, Reach] = {op: {} for op in paced}  # of each stream, so far
        self._receives_after = receives_after(plan)

    def run(self) -> list[str]:
        """Return every problem of the plan, in issue order."""
        for place, ins in enumerate(self.plan.instrs):
            mine = self._known.setdefault(ins.stream, {})
            self._wait(place, ins, mine)
            self._pace(place, ins, mine)
            for slot in ins.reads:
                self._read(place, ins, slot, mine)
            for slot in ins.writes:
                self._write(place, ins, slot, mine)
            for slot in ins.frees:
                self._free(place, ins, slot, mine)
            mine[ins.stream] = place
            if ins.op in self._last:
                self._last[ins.op][ins.stream] = place
            if ins.signals is not None:
                if ins.signals in self._signalled:
                    self._complain(place, f"signals event {ins.signals}, which is signalled already")
                self._signalled[ins.signals] = (ins.stream, place, dict(mine))
        for slot, place in self._written.items():
            if slot not in self._freed and slot not in self.plan.residents:
                self._complain(place, f"writes {slot}, which is never freed")
        return self.problems

    def _complain(self, place: int, what: str) -> None:
        self.problems.append(f"{self.plan.instrs[place].node} {what}\n{self.plan.around(place)}")

    def _wait(self, place: int, ins: Instr, mine: Reach) -> None:
        for event in ins.waits:
            if event not in self._signalled:
                self._complain(place, f"waits for event {event}, which nothing before it signals")
                continue
            stream, when, seen = self._signalled[event]
            for other, reached in (*seen.items(), (stream, when)):
                if mine.get(other, -1) < reached:
                    mine[other] = reached

    def _pace(self, place: int, ins: Instr, mine: Reach) -> None:
        """Complain about an instruction that allocates whole parameters, gradients or activations too early.

        Streams must be known to have finished what was issued before it and frees such memory.
        """
        if ins.op in ("compute", "update"):
            self._check_over(place, ins, "offload", mine)
        if ins.op == "fetch":
            self._check_over(place, ins, "update", mine)
        whole = ins.op == "gather" and not self.plan.slots.keys().isdisjoint(ins.writes)
        if whole or ins.op == "fetch":
            self._check_over(place, ins, "compute", mine)
        fresh = (slot for slot in ins.writes if slot not in ins.reads)
        if ins.op == "compute" and not self._scattered.isdisjoint(fresh):
            self._check_over(place, ins, "reduce_scatter", mine)
        when = self._receives_after.get(place, -1)
        if when >= 0 and mine.get(self.plan.instrs[when].stream, -1) < when:
            self._complain(place, f"may take multiprocessors from {self.plan.instrs[when].node}")

    def _check_over(self, place: int, ins: Instr, op: Op, mine: Reach) -> None:
        for stream, when in self._last[op].items():
            if stream != ins.stream and mine.get(stream, -1) < when:
                self._complain(place, f"may run ahead of {self.plan.instrs[when].node} and fill the memory")

    def _read(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self._freed:
            self._complain(place, f"reads {slot}, freed at {self._freed[slot]}")
        elif slot in self._written:
            writer = self._written[slot]
            stream = self.plan.instrs[writer].stream
            if stream != ins.stream and mine.get(stream, -1) < writer:
                self._complain(place, f"reads {slot} without waiting for who writes it, at {writer}")
        elif slot not in self.plan.residents:
            self._complain(place, f"reads {slot}, which nothing has written")
        self._touch(place, ins, slot)

    def _write(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self._freed:
            self._complain(place, f"writes {slot}, freed at {self._freed[slot]}")
        elif slot not in self.plan.slots and slot not in self.plan.residents:
            self._complain(place, f"writes {slot}, which has no size")
        self._check_done(place, ins, slot, mine, f"writes {slot}")
        if slot in self._shares and slot not in self._written:
            for storage in self._shares[slot]:
                self._sharers[storage] = self._sharers.get(storage, 0) + 1
        self._written[slot] = place
        self._touch(place, ins, slot)

    def _free(self, place: int, ins: Instr, slot: SlotId, mine: Reach) -> None:
        if slot in self.plan.residents:
            self._complain(place, f"frees {slot}, which outlives the step")
        elif slot in self._freed:
            self._complain(place, f"frees {slot}, freed at {self._freed[slot]}")
        elif slot not in self._written:
            self._complain(place, f"frees {slot}, which nothing has written")
        else:
            self._check_done(place, ins, slot, mine, f"frees {slot}")
            for storage in self._shares.get(slot, ()):
                self._sharers[storage] -= 1
                if not self._sharers[storage]:
                    self._check_done(place, ins, storage, mine, f"frees {storage}")
            self._freed[slot] = place

    def _touch(self, place: int, ins: Instr, slot: SlotId) -> None:
        self._touched.setdefault(slot, {})[ins.stream] = place
        if slot in self._shares:
            for storage in self._shares[slot]:
                self._touched.setdefault(storage, {})[ins.stream] = place

    def _check_done(self, place: int, ins: Instr, slot: SlotId, mine: Reach, what: str) -> None:
        """Complain about every other stream that used a slot and is not known to be done with it."""
        for stream, when in self._touched.get(slot, {}).items():
            if stream != ins.stream and mine.get(stream, -1) < when:
                self._complain(place, f"{what} while {self.plan.instrs[when].node} may still use it")


def receives_after(plan: Plan) -> dict[int, int]:
    """Return, for each receive, the computation that is over when it begins.

    It is the last one issued before it, but for the one right before the first reader, which it overlaps.
    """
    computes = [place for place, ins in enumerate(plan.instrs) if ins.op == "compute"]
    first_read: dict[SlotId, int] = {}
    after: dict[int, int] = {}
    for place in reversed(range(len(plan.instrs))):
        ins = plan.instrs[place]
        if ins.op == "recv":
            read = min((first_read[slot] for slot in ins.writes if slot in first_read), default=None)
            overlapped = bisect_left(computes, len(plan.instrs) if read is None else read) - 1
            last = min(bisect_left(computes, place) - 1, overlapped - 1)
            if last >= 0:
                after[place] = computes[last]
        for slot in ins.reads:
            first_read[slot] = place
    return after
