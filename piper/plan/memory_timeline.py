"""How much memory a device holds as it goes through its plan, storage by storage."""

from collections.abc import Iterable
from dataclasses import dataclass

from piper.ir.ids import SlotId
from piper.plan.instr import Instr
from piper.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """The bytes live while each instruction runs, in issue order."""

    resident: int  # held between steps: parameters, optimizer state, buffers
    live: tuple[int, ...]  # while instruction i runs: residents, slots and its workspace
    peak: int
    peak_at: int  # the instruction at the peak


class Ledger:
    """Counts live bytes as slots are written and freed. A shared storage is freed with its last slot."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.resident = self.live = sum(slot.nbytes for slot in plan.residents.values())
        self.slots: set[SlotId] = set()  # those that are live
        self.sharers: dict[SlotId, int] = {}

    def hold(self, slots: Iterable[SlotId]) -> None:
        """Add the slots that are newly written to the live bytes."""
        for slot in slots:
            if slot not in self.plan.slots or slot in self.slots:
                continue
            self.slots.add(slot)
            spec = self.plan.slots[slot]
            self.live += spec.nbytes
            for storage, nbytes in spec.shares:
                self.sharers[storage] = self.sharers.get(storage, 0) + 1
                if self.sharers[storage] == 1:
                    self.live += nbytes

    def release(self, slots: Iterable[SlotId]) -> None:
        """Subtract freed slots from the live bytes."""
        for slot in slots:
            self.slots.discard(slot)
            spec = self.plan.slots[slot]
            self.live -= spec.nbytes
            for storage, nbytes in spec.shares:
                self.sharers[storage] -= 1
                if not self.sharers[storage]:
                    self.live -= nbytes


def timeline(plan: Plan) -> MemoryTimeline:
    """Walk a plan in issue order, and return the live bytes at each instruction."""
    ledger = Ledger(plan)
    live: list[int] = []
    peak, peak_at = ledger.resident, 0
    for place, ins in enumerate(plan.instrs):
        ledger.hold(ins.writes)
        now = ledger.live + ins.workspace
        live.append(now)
        if now > peak:
            peak, peak_at = now, place
        ledger.release(ins.frees)
    return MemoryTimeline(resident=ledger.resident, live=tuple(live), peak=peak, peak_at=peak_at)


def host_peak(plan: Plan) -> int:
    """Return the most bytes of the host's memory that a device uses at a time, in issue order."""
    live = peak = sum(slot.host for slot in plan.residents.values())
    for ins in plan.instrs:
        live += sum(plan.slots[slot].host for slot in ins.writes if slot in plan.slots)
        peak = max(peak, live)
        live -= sum(plan.slots[slot].host for slot in ins.frees)
    return peak


def allocations(plan: Plan) -> dict[SlotId, int]:
    """Return the place of an instruction on the stream that allocates each slot.

    That is the instruction which writes it first. What comes back from the host is allocated for the
    instruction that reads it first, so that this one may free it while it runs.
    """
    allocated: dict[SlotId, int] = {}
    waiting: dict[SlotId, Instr] = {}  # what came back and is not read yet
    for place, ins in enumerate(plan.instrs):
        for back in {id(waiting[slot]): waiting[slot] for slot in ins.reads if slot in waiting}.values():
            for slot in back.writes:
                allocated[slot] = place
                del waiting[slot]
        for slot in ins.writes:
            allocated.setdefault(slot, place)
        if ins.op == "fetch":
            waiting |= dict.fromkeys(ins.writes, ins)
    return allocated
