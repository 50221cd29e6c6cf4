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
    """Counts live bytes as slots are written and freed. A shared storage is freed with its last slot.

    The workspaces of instructions that run count too.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running: dict[int, int] = {}  # by instruction: its workspace
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

    def start(self, place: int) -> int:
        """Start an instruction, and return the live bytes."""
        ins = self.plan.instrs[place]
        self.hold(ins.writes)
        self.running[place] = ins.workspace
        return self.live + sum(self.running.values())

    def end(self, place: int) -> int:
        """End an instruction, and return the live bytes."""
        self.running.pop(place, None)
        self.release(self.plan.instrs[place].frees)
        return self.live + sum(self.running.values())

    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return the live slots and workspaces, largest first. A storage that slots share counts once."""
        sizes: dict[str, int] = {name: slot.nbytes for name, slot in self.plan.residents.items()}
        for name in self.slots:
            sizes[name] = self.plan.slots[name].nbytes
            sizes.update(self.plan.slots[name].shares)
        for place, workspace in self.running.items():
            sizes[f"workspace of {self.plan.instrs[place].node}"] = workspace
        return tuple(sorted(((n, b) for n, b in sizes.items() if b), key=lambda item: (-item[1], item[0])))


def timeline(plan: Plan) -> MemoryTimeline:
    """Walk a plan in issue order, and return the live bytes at each instruction."""
    ledger = Ledger(plan)
    live: list[int] = []
    for place in range(len(plan.instrs)):
        live.append(ledger.start(place))
        ledger.end(place)
    peak = max([ledger.resident, *live])
    peak_at = live.index(peak) if peak > ledger.resident else 0
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
