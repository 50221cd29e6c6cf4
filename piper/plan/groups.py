"""Plans of all groups that train apart, made from those of one group, or cut down to those of the first."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

from piper.ir.averaging import Averaging
from piper.ir.devices import Devices
from piper.ir.ids import SlotId
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Collecting, Field, Op
from piper.plan.plan import PlacedChunk, Plan, Plans

ChangeDevices = Callable[[Devices], Devices]
ChangeSets = Callable[[tuple[Devices, ...]], tuple[Devices, ...]]
SETS = tuple[Devices, ...]
T = TypeVar("T", bound=Any)


class ChangedDevices:
    """Plans with other devices in every place that names some."""

    def __init__(self, devices: ChangeDevices, sets: ChangeSets) -> None:
        """Take what becomes of devices that run the same, and of sets that communicate."""
        self.devices, self.sets = devices, sets

    def record(self, record: T) -> T:
        """Return a record in which each field that names devices names others."""
        changed: dict[str, object] = {}
        for each in fields(record):
            if each.type == SETS:
                changed[each.name] = self.sets(getattr(record, each.name))
            elif each.name in ("devices", "placed"):  # their type is that of other numbers too
                changed[each.name] = self.devices(getattr(record, each.name))
        return replace(record, **changed)

    def plan(self, plan: Plan) -> Plan:
        """Return one program for other devices."""
        residents = {self.slot_id(name): self.record(slot) for name, slot in plan.residents.items()}
        return replace(self.record(plan), instrs=tuple(map(self.instr, plan.instrs)), residents=residents)

    def instr(self, ins: Instr) -> Instr:
        """Return an instruction, whose payload and slots may name devices."""
        if isinstance(ins.payload, Field | Collecting):
            ins = replace(ins, payload=self.record(ins.payload))
        if any(slot.kind in ("place", "host_place") for slot in ins.reads):
            ins = replace(ins, reads=tuple(map(self.slot_id, ins.reads)))
        return ins

    def slot_id(self, slot: SlotId) -> SlotId:
        """Return the id of a slot that tells a device its place among others."""
        if slot.kind not in ("place", "host_place"):
            return slot
        region, group = slot.devices
        return SlotId(slot.kind, slot.owner, devices=(self.devices(region), group))

    def chunk(self, chunk: PlacedChunk) -> PlacedChunk:
        """Return a chunk that runs on other devices."""
        elsewhere = {part: self.devices(devices) for part, devices in chunk.elsewhere.items()}
        return replace(self.record(chunk), elsewhere=elsewhere)

    def all(self, plans: Plans, cells: int) -> Plans:
        """Return plans for other devices. cells: the slices of all samples there."""
        return replace(
            plans,
            plans=tuple(map(self.plan, plans.plans)),
            comms={name: self.record(comm) for name, comm in plans.comms.items()},
            buckets={name: self.record(bucket) for name, bucket in plans.buckets.items()},
            chunks={name: self.chunk(chunk) for name, chunk in plans.chunks.items()},
            cells=cells,
        )


def fragments_of(buckets: Mapping[str, Bucket], averaging: Averaging) -> dict[str, int]:
    """Return the fragment of each bucket that trains, dealt out in order. Tied parameters go together."""
    families: dict[tuple[str, ...], int] = {}
    for bucket in buckets.values():
        if bucket.trainable:
            families.setdefault(tuple(sorted((bucket.name, *bucket.siblings))), len(families))
    return {name: number % averaging.fragments for family, number in families.items() for name in family}


def of_first_group(plans: Plans, averaging: Averaging) -> Plans:
    """Return the plans of the first group alone, in which an average has no peers."""

    def sets_of_first(sets: tuple[Devices, ...]) -> tuple[Devices, ...]:
        return tuple(devices for devices in sets if averaging.first(devices) == devices)

    plans = ChangedDevices(averaging.first, sets_of_first).all(plans, plans.cells // len(averaging.groups))
    plans = plans.with_instrs(lambda ins: replace(ins, comm=None) if ins.op == "average" else ins)
    return replace(plans, comms={name: comm for name, comm in plans.comms.items() if comm.groups})


def kinds_of_step(plans: Plans) -> list[tuple[int, Plans]]:
    """Return the different steps from one average to the next, with how many of each there are."""
    # In each, the averages and merges that are not due are instructions that do nothing.
    averaging = plans.averaging
    if averaging is None:
        return [(1, plans)]
    fragments = fragments_of(plans.buckets, averaging)
    counts: dict[frozenset[tuple[Op, str]], int] = {}
    for step in range(2 * averaging.every, 3 * averaging.every):  # every fragment has been due before
        done: set[tuple[Op, str]] = set()
        for name, fragment in fragments.items():
            due, sent = averaging.due(step, fragment), averaging.part_sent(step, fragment) is not None
            if sent if averaging.overlap else due:
                done.add(("average", name))
            if averaging.overlap and (due or averaging.merges(step, fragment)):
                done.add(("merge", name))
        counts[frozenset(done)] = counts.get(frozenset(done), 0) + 1

    def quiet(kind: frozenset[tuple[Op, str]], ins: Instr) -> Instr:
        if ins.op not in ("average", "merge") or (ins.op, ins.writes[0].owner) in kind:
            return ins
        return replace(ins, op="merge", comm=None, reads=(), writes=(), nbytes=0, workspace=0)

    return [(count, plans.with_instrs(partial(quiet, kind))) for kind, count in counts.items()]
