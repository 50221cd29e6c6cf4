"""Plans of all groups that train apart, made from those of one group, or cut down to those of the first."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from piper.ir.averaging import Averaging
from piper.ir.devices import Devices
from piper.ir.ids import SlotId
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Collecting, Field, Op
from piper.plan.plan import PlacedChunk, Plan, Plans

ChangeDevices = Callable[[Devices], Devices]
ChangeSets = Callable[[tuple[Devices, ...]], tuple[Devices, ...]]


class ChangedDevices:
    """Plans with other devices in every place that names some."""

    def __init__(self, devices: ChangeDevices, sets: ChangeSets) -> None:
        """Take what becomes of devices that run the same, and of sets that communicate."""
        self.devices, self.sets = devices, sets

    def plan(self, plan: Plan) -> Plan:
        """Return one program for other devices."""
        return replace(
            plan,
            devices=self.devices(plan.devices),
            instrs=tuple(map(self.instr, plan.instrs)),
            residents={
                self.slot_id(name): replace(slot, placed=self.devices(slot.placed)) if slot.placed else slot
                for name, slot in plan.residents.items()
            },
        )

    def instr(self, ins: Instr) -> Instr:
        """Return an instruction, whose payload and slots may name devices."""
        payload = ins.payload
        if isinstance(payload, Field | Collecting) and payload.devices:
            ins = replace(ins, payload=replace(payload, devices=self.devices(payload.devices)))
        if any(slot.kind in ("place", "host_place") for slot in ins.reads):
            ins = replace(ins, reads=tuple(map(self.slot_id, ins.reads)))
        return ins

    def slot_id(self, slot: SlotId) -> SlotId:
        """Return the id of a slot that tells a device its place among others."""
        if slot.kind not in ("place", "host_place"):
            return slot
        region, group = slot.devices
        return SlotId(slot.kind, slot.owner, devices=(self.devices(region), group))

    def bucket(self, bucket: Bucket) -> Bucket:
        """Return a bucket that lies on other devices."""
        return replace(
            bucket,
            devices=self.devices(bucket.devices),
            groups=self.sets(bucket.groups),
            inside=self.sets(bucket.inside),
            across=self.sets(bucket.across),
            slices=self.sets(bucket.slices),
        )

    def chunk(self, chunk: PlacedChunk) -> PlacedChunk:
        """Return a chunk that runs on other devices."""
        elsewhere = {part: self.devices(devices) for part, devices in chunk.elsewhere.items()}
        return replace(chunk, devices=self.devices(chunk.devices), elsewhere=elsewhere)

    def all(self, plans: Plans, cells: int) -> Plans:
        """Return plans for other devices. cells: the slices of all samples there."""
        return replace(
            plans,
            plans=tuple(map(self.plan, plans.plans)),
            comms={name: replace(comm, groups=self.sets(comm.groups)) for name, comm in plans.comms.items()},
            buckets={name: self.bucket(bucket) for name, bucket in plans.buckets.items()},
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
