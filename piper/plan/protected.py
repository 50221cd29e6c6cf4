"""Which copies of the state the plans keep, on which devices, and which losses the copies survive.

[Note: sections] An instruction `protect` copies what its device owns of its slots into one section of the
memory that the device writes to. `mirror` gives sections to the next device of a ring, which keeps them as
sections of its own memory. A section is copied whole or not at all, so a state is complete if every element
that a step writes is in some section of the same step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from piper.ir.devices import show
from piper.ir.format import size
from piper.ir.grouping import grouped
from piper.ir.ids import SlotId, param_slot, state_slot
from piper.plan.bucket import Bucket
from piper.plan.plan import Plan, Plans

MIRRORED = 2**24  # bytes of copies that a device sends at a time
GENERATIONS = 2  # versions that are held: one that is complete, and one that is written
Elements = tuple[str, object]  # a bucket or buffer, and which slice and shard of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSection:
    """A part of the state in the memory of one device. See [Note: sections]."""

    holder: int  # the device in whose memory it lies
    owner: int  # the device whose state it is
    number: int = 0  # in the memory of the holder, from 1
    by: str  # the node that copies it, or that brings it from its owner
    sent_by: str  # the node that gives a copy of it to another device. Empty: it stays
    elements: tuple[Elements, ...]
    nbytes: int  # of parameters, optimizer state and buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """The copies that the devices of one program make with one instruction, a section each."""

    plan: Plan
    program: int  # its number
    node: str
    slots: tuple[SlotId, ...]  # of parameters and buffers
    sent_by: str
    receivers: Mapping[int, tuple[int]]  # by the device that sends

    def holders(self, device: int) -> tuple[int, ...]:
        """Return the devices that hold the copy of one device: itself, and the one that it sends it to."""
        return device, *self.receivers.get(device, ())


class ProtectedState:
    """The sections of some plans."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.first: dict[str, str] = {}  # of a parameter's buckets, the first: the others hold the same
        for bucket in plans.buckets.values():
            for piece in bucket.pieces:
                self.first.setdefault(piece.name, bucket.name)
        self._plan_of = {device: plan for plan in plans for device in plan.devices}
        self._ownership = {name: bucket.update.ownership for name, bucket in plans.buckets.items()}
        shares = {each: each.shares() for each in set(self._ownership.values())}
        self._shares = {name: shares[each] for name, each in self._ownership.items()}
        self._copies = list(copies_in(plans))
        self._sizes: dict[str, tuple[Bucket, int]] = {}  # and the bytes of an element with its state

    @cached_property
    def sections(self) -> tuple[StateSection, ...]:
        """Return every section, device by device: its own ones first, then those of another device."""
        own = [(copy, self._section(copy, device)) for copy in self._copies for device in copy.plan.devices]
        received = [
            replace(section, holder=receiver, by=copy.sent_by, sent_by="")
            for copy, section in own
            for receiver in copy.receivers.get(section.owner, ())
        ]
        by_holder: dict[int, list[StateSection]] = {}
        for section in (*(section for _, section in own), *received):
            held = by_holder.setdefault(section.holder, [])
            held.append(replace(section, number=len(held) + 1))
        return tuple(section for device in sorted(by_holder) for section in by_holder[device])

    def _section(self, copy: StateCopy, device: int) -> StateSection:
        return StateSection(
            holder=device,
            owner=device,
            by=copy.node,
            sent_by=copy.sent_by,
            elements=tuple(self.elements(slot, device) for slot in copy.slots),
            nbytes=sum(self._nbytes(copy.plan, slot, device) for slot in copy.slots),
        )

    def elements(self, slot: SlotId, device: int) -> Elements:
        """Return the elements that a device owns of a bucket or buffer."""
        return self._name(slot), self._part(slot, device)

    def _part(self, slot: SlotId, device: int) -> object:
        """Return which group that trains apart, which slice and which shard of a slot a device has."""
        group, _ = self.plans.place_in_group(device)
        if slot.kind == "buffer":
            resident = self._plan_of[device].residents.get(slot)
            if resident is None or not resident.shardings:
                return group, 0
            return group, resident.sharding.index(resident.position(device))
        share = self._shares.get(slot.owner, {}).get(device)
        return None if share is None else (group, share)

    def _bucket(self, slot: SlotId) -> Bucket | None:
        """Return the bucket that a slot holds. None: it holds a buffer."""
        return self.plans.buckets.get(slot.owner) if slot.kind == "param" else None

    def _nbytes(self, plan: Plan, slot: SlotId, device: int) -> int:
        """Return the bytes of a device's own elements, without padding, and of their optimizer state."""
        if slot.kind == "buffer":
            return plan.residents[slot].nbytes if slot in plan.residents else 0
        bucket = self._bucket(slot)
        if bucket is None or device not in self._shares[bucket.name]:
            return 0
        if bucket.name not in self._sizes:
            update, state = bucket.update, plan.residents.get(state_slot(bucket.name))
            each = 0 if bucket.has_master else bucket.itemsize
            self._sizes[bucket.name] = update, each + (state.everywhere // update.elements() if state else 0)
        update, each = self._sizes[bucket.name]
        numel, (_, shard) = update.own_numel, self._shares[bucket.name][device]
        start, stop = update.shard(shard) if update.zero else (0, numel)
        return max(0, min(stop, numel) - start) * each

    @cached_property
    def written(self) -> frozenset[Elements]:
        """Return the elements that a step writes and a later one needs."""
        placed = chain.from_iterable(self._written_slots.values())
        return frozenset(self.elements(slot, device) for plan, slot in placed for device in plan.devices)

    @cached_property
    def _written_slots(self) -> dict[str, list[tuple[Plan, SlotId]]]:
        """Return where each bucket or buffer is that a step writes, by its name."""
        slots: dict[str, dict[tuple[int, SlotId], Plan]] = {}
        for number, plan in enumerate(self.plans):
            for ins in plan.instrs:
                for slot in ins.writes:
                    if slot.kind in ("param", "buffer") and slot in plan.residents:
                        slots.setdefault(self._name(slot), {})[number, slot] = plan
        return {name: [(plan, slot) for (_, slot), plan in found.items()] for name, found in slots.items()}

    def _name(self, slot: SlotId) -> str:
        """Return the name of a bucket or buffer; buckets of a tied parameter share that of the first."""
        bucket = self._bucket(slot)
        return str(slot if bucket is None else param_slot(self.first[bucket.pieces[0].name]))

    def _alike(self, slot: SlotId) -> object:
        """Return what decides which devices own which elements of a slot: equal layers have equal ones."""
        bucket = self._bucket(slot)
        return slot if bucket is None else self._ownership[bucket.name]

    def named(self, slot: SlotId) -> str:
        """Return a parameter of a bucket, or a buffer, for messages."""
        bucket = self._bucket(slot)
        return slot.owner if bucket is None else bucket.pieces[0].name

    @cached_property
    def host_bytes(self) -> dict[int, int]:
        """Return the bytes of one version of the state in the memory of each machine."""
        assert self.plans.protection is not None
        machine = self.plans.protection.machine
        sizes = {machine(device): 0 for device in self.plans.devices}
        kinds = ((c.program, c.sent_by, tuple(map(self._alike, c.slots))) for c in self._copies)
        for first, *others in grouped(zip(kinds, self._copies, strict=True)).values():
            by_part: dict[object, int] = {}
            for device in first.plan.devices:
                part = tuple(self._part(slot, device) for slot in first.slots)
                if part not in by_part:
                    slots = (slot for copy in (first, *others) for slot in copy.slots)
                    by_part[part] = sum(self._nbytes(first.plan, slot, device) for slot in slots)
                for holder in first.holders(device):
                    sizes[machine(holder)] += by_part[part]
        return sizes

    def lost_with(self, domain: Callable[[int], int]) -> dict[int | None, SlotId]:
        """Return what is lost with the memory of each domain, as one slot of which elements lie only there.

        domain: of a device. None: nothing holds the elements at all. Slots that are owned and copied in the
        same way, as those of equal layers are, are lost together: the devices of one of them are looked at.
        """
        copies_of = grouped((self._name(s), (copy, s)) for copy in self._copies for s in copy.slots)
        alike: dict[object, str] = {}  # the first name of those that are
        for name, placed in self._written_slots.items():
            owned = tuple((plan.devices, self._alike(slot)) for plan, slot in placed)
            copied = ((copy.program, copy.sent_by, self._alike(s)) for copy, s in copies_of.get(name, ()))
            alike.setdefault((owned, tuple(copied)), name)
        lost: dict[int | None, SlotId] = {}
        for name in alike.values():
            domains: dict[object, set[int]] = {}
            for copy, slot in copies_of.get(name, ()):
                for device in copy.plan.devices:
                    where = domains.setdefault(self._part(slot, device), set())
                    where.update(map(domain, copy.holders(device)))
            for plan, slot in self._written_slots[name]:
                for device in plan.devices:
                    where = domains.get(self._part(slot, device), set())
                    if len(where) < 2:
                        lost.setdefault(next(iter(where), None), slot)
        return lost


def copies_in(plans: Plans) -> Iterator[StateCopy]:
    """Yield every copy of the state that programs make."""
    receivers: dict[str, dict[int, tuple[int]]] = {"": {}}  # by the node that sends
    for number, plan in enumerate(plans):
        sent_by: dict[SlotId, str] = {}
        for ins in plan.instrs:
            if ins.op == "mirror":
                sent_by |= dict.fromkeys(ins.reads, ins.node)
                if ins.node not in receivers:  # a ring of all devices: too many to walk for each program
                    comm = plans.comms.get(ins.comm or "")
                    rings = (zip(g, (*g[1:], g[0]), strict=True) for g in (comm.groups if comm else ()))
                    receivers[ins.node] = {a: (b,) for ring in rings for a, b in ring}
        for ins in plan.instrs:
            if ins.op == "protect":
                mirror = next((sent_by[slot] for slot in ins.writes if slot in sent_by), "")
                slots = tuple(slot for slot in ins.reads if slot.kind in ("param", "buffer"))
                yield StateCopy(
                    plan=plan,
                    program=number,
                    node=ins.node,
                    slots=slots,
                    sent_by=mirror,
                    receivers=receivers[mirror],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What a job survives, and the memory of hosts that it takes."""

    copies: int
    every: int  # steps from one version to the next
    machines: int
    losable: tuple[int, ...]  # the machines without which every element is still held
    apart: bool  # the memory of any single device may be lost
    host_bytes: tuple[int, ...]  # of each machine, for the versions that are held at a time

    def __str__(self) -> str:
        """Return it in one line."""
        if len(self.losable) == self.machines:
            lost = "any machine"
        else:
            lost = f"machines {show(self.losable)} of {self.machines}" if self.losable else "no machine"
        if self.apart and not self.losable:
            lost += ", but the memory of any device"
        held = size(max(self.host_bytes, default=0))
        return f"survives: any worker; {lost} (copies={self.copies}); host memory {held} per machine"


def survival(plans: Plans) -> Survival | None:
    """Return what a job survives by the copies that its plans make. None: they make none."""
    asked = plans.protection
    if asked is None:
        return None
    state = ProtectedState(plans)
    machines = sorted({asked.machine(device) for device in plans.devices})
    lost = state.lost_with(asked.machine)
    return Survival(
        copies=asked.copies,
        every=asked.every,
        machines=len(machines),
        losable=tuple(machine for machine in machines if machine not in lost),
        apart=asked.copies > 0 and asked.apart == "device",
        host_bytes=tuple(GENERATIONS * nbytes for nbytes in state.host_bytes.values()),
    )


def protection_problems(plans: Plans) -> Iterator[str]:
    """Yield what a step writes and no copy holds, and what is lost with a machine or a device."""
    asked = plans.protection
    for plan in plans:
        yield from order_problems(plan)
        if asked is None and any(ins.op in ("protect", "mirror") for ins in plan.instrs):
            yield f"device {plan.devices[0]} copies its state, and the plans do not say how copies are kept"
    if asked is None:
        return
    state = ProtectedState(plans)
    lost = state.lost_with(asked.domain)
    for domain, members in asked.domains(plans.devices).items() if asked.copies else ():
        if domain in lost:
            named = f"the {asked.apart} of devices {show(members)}"
            yield (
                f"{state.named(lost[domain])} is lost with {named}: no other {asked.apart} holds a copy of "
                f"these elements of {lost[domain]}"
            )
    if (slot := lost.get(None)) is not None:
        yield f"{state.named(slot)} is written by a step, and no instruction copies all of {slot} before"


def order_problems(plan: Plan) -> Iterator[str]:
    """Yield each copy of a bucket without its optimizer state, and each that is made after a write."""
    written: dict[SlotId, str] = {}
    for ins in plan.instrs:
        if ins.op == "protect":
            for slot in ins.reads:
                if slot in written:
                    yield f"{ins.node} copies {slot}, which {written[slot]} has already written"
                state = state_slot(slot.owner)
                if slot.kind == "param" and state in plan.residents and state not in ins.reads:
                    yield f"{ins.node} copies {slot} without its optimizer state"
        for slot in ins.writes:
            written.setdefault(slot, ins.node)
