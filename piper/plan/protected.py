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
from piper.ir.ids import SlotId, param_slot, state_slot
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans

MIRRORED = 2**24  # bytes of copies that a device sends at a time
GENERATIONS = 2  # versions that are held: one that is complete, and one that is written
Elements = tuple[str, object]  # a bucket or buffer, and which slice and shard of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSection:
    """A part of the state in the memory of one device. See [Note: sections]."""

    holder: int  # the device in whose memory it lies
    owner: int  # the device whose state it is
    number: int  # in the memory of the holder, from 1
    by: str  # the node that copies it, or that brings it from its owner
    elements: tuple[Elements, ...]
    nbytes: int  # of parameters, optimizer state and buffers


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
        self._receivers: dict[str, Mapping[int, tuple[int]]] = {"": {}}  # by the node that sends
        for ins in (ins for plan in plans for ins in plan.instrs if ins.op == "mirror"):
            if ins.node not in self._receivers:
                comm = plans.comms.get(ins.comm or "")
                rings = (zip(g, (*g[1:], g[0]), strict=True) for g in (comm.groups if comm else ()))
                self._receivers[ins.node] = {a: (b,) for ring in rings for a, b in ring}
        self._sizes: dict[str, tuple[Bucket, int]] = {}  # and the bytes of an element with its state

    @cached_property
    def sections(self) -> tuple[StateSection, ...]:
        """Return every section, device by device."""
        own: dict[int, list[StateSection]] = {}
        for plan in self.plans:
            copied = [ins for ins in plan.instrs if ins.op == "protect"]
            for device in plan.devices:
                own[device] = [self._section(plan, ins, device, i) for i, ins in enumerate(copied, 1)]
        by_holder = {device: list(sections) for device, sections in own.items()}
        for plan in self.plans:
            for ins in plan.instrs:
                if ins.op != "mirror":
                    continue
                receivers = self._receivers[ins.node]
                for device in plan.devices:
                    (holder,) = receivers.get(device, (device,))
                    for section in sent(plan, ins, own[device]):
                        number = len(by_holder[holder]) + 1
                        copy = replace(section, holder=holder, number=number, by=ins.node)
                        by_holder[holder].append(copy)
        return tuple(section for device in sorted(by_holder) for section in by_holder[device])

    def _section(self, plan: Plan, ins: Instr, device: int, number: int) -> StateSection:
        slots = [slot for slot in ins.reads if slot.kind in ("param", "buffer")]
        return StateSection(
            holder=device,
            owner=device,
            number=number,
            by=ins.node,
            elements=tuple(self.elements(slot, device) for slot in slots),
            nbytes=sum(self._nbytes(plan, slot, device) for slot in slots),
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

    @cached_property
    def _copies(self) -> list["StateCopy"]:
        """Return every copy that a program makes of a bucket or buffer."""
        copies: list[StateCopy] = []
        for number, plan in enumerate(self.plans):
            mirrors = [ins for ins in plan.instrs if ins.op == "mirror"]
            for ins in plan.instrs:
                if ins.op == "protect":
                    mirror = next((m.node for m in mirrors if not set(ins.writes).isdisjoint(m.reads)), "")
                    copies += [
                        StateCopy(plan=plan, number=number, slot=slot, mirror=mirror)
                        for slot in ins.reads
                        if slot.kind in ("param", "buffer")
                    ]
        return copies

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
        alike: dict[tuple[object, ...], list[StateCopy]] = {}
        for copy in self._copies:
            key = (copy.number, copy.mirror, self._alike(copy.slot))
            alike.setdefault(key, []).append(copy)
        for copies in alike.values():
            plan, receivers = copies[0].plan, self._receivers[copies[0].mirror]
            by_part: dict[object, int] = {}
            for device in plan.devices:
                part = self._part(copies[0].slot, device)
                if part not in by_part:
                    by_part[part] = sum(self._nbytes(plan, copy.slot, device) for copy in copies)
                for holder in (device, *receivers.get(device, ())):
                    sizes[machine(holder)] += by_part[part]
        return sizes

    def lost_with(self, domain: Callable[[int], int]) -> dict[int | None, SlotId]:
        """Return what is lost with the memory of each domain, as one slot of which elements lie only there.

        domain: of a device. None: nothing holds the elements at all. Slots that are owned and copied in the
        same way, as those of equal layers are, are lost together: the devices of one of them are looked at.
        """
        copies_of: dict[str, list[StateCopy]] = {}
        for copy in self._copies:
            copies_of.setdefault(self._name(copy.slot), []).append(copy)
        lost: dict[int | None, SlotId] = {}
        seen: set[object] = set()
        for name, placed in self._written_slots.items():
            copies = copies_of.get(name, [])
            key = (
                tuple((plan.devices, self._alike(slot)) for plan, slot in placed),
                tuple((copy.number, copy.mirror, self._alike(copy.slot)) for copy in copies),
            )
            if key not in seen:
                seen.add(key)
                self._lose(placed, copies, domain, lost)
        return lost

    def _lose(
        self,
        placed: list[tuple[Plan, SlotId]],
        copies: list["StateCopy"],
        domain: Callable[[int], int],
        lost: dict[int | None, SlotId],
    ) -> None:
        """Add what is lost of one bucket or buffer to `lost`."""
        domains: dict[object, set[int]] = {}
        for copy in copies:
            receivers = self._receivers[copy.mirror]
            for device in copy.plan.devices:
                where = domains.setdefault(self._part(copy.slot, device), set())
                where.update(map(domain, (device, *receivers.get(device, ()))))
        for plan, slot in placed:
            for device in plan.devices:
                where = domains.get(self._part(slot, device), set())
                if len(where) < 2:
                    lost.setdefault(next(iter(where), None), slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """A copy that the devices of one program make of a bucket or buffer."""

    plan: Plan
    number: int  # of the program
    slot: SlotId
    mirror: str  # the node that gives it to another device. Empty: it stays


def sent(plan: Plan, ins: Instr, own: list[StateSection]) -> list[StateSection]:
    """Return the sections of a device that an instruction sends: those whose copies it reads."""
    copied = [other for other in plan.instrs if other.op == "protect"]
    return [s for other, s in zip(copied, own, strict=True) if not set(other.writes).isdisjoint(ins.reads)]


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
