"""Copies of the state that a step begins with, into memory that outlives workers, while the step runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from piper.errors import ScheduleError
from piper.ir.chunk_options import Protection, StateCopies
from piper.ir.devices import Devices, show
from piper.ir.ids import SlotId, buffer_slot, param_slot, state_slot
from piper.ir.node import SlotNode
from piper.lower.placements import placements_of
from piper.lower.state import LoweringState, SequenceEdit
from piper.plan.plan import Slot
from piper.plan.updates import Ownership, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """A part of the state that is copied: what it is, where it lies and what holds it."""

    what: str
    chunks: tuple[str, ...]
    slots: tuple[SlotId, ...]
    named: str  # a parameter or buffer in it, for messages
    owned_as: Ownership  # who has which elements
    nbytes: int


def add_protections(state: LoweringState) -> LoweringState:
    """Copy all that the step writes before it is written, and send copies to other machines or devices.

    F[PP=0]  B[PP=0]  norm  total  update
    -->
    protect[PP=0/0], F[PP=0]  B[PP=0], mirror (copies=1), norm  total  update
    """
    asked = state.graph.protection
    if asked is None or not state.settings.trains:
        return state
    written = {value for node in state.sequence for value in node.writes if value in state.residents}
    edit = SequenceEdit(state)
    sent: list[SlotNode] = []
    chosen: dict[object, tuple[Devices, Devices]] = {}  # equal layers are kept by the same devices
    for copying in (*buffer_copies(state, written), *bucket_copies(state, written)):
        by = protected_by(state, copying)
        if copying.owned_as not in chosen:
            chosen[copying.owned_as] = holders(copying.owned_as.owners(), asked)
        keep, send = chosen[copying.owned_as]
        for devices, slots in ((keep, ()), (send, (SlotId("copy", copying.what),))):
            if devices:
                node = SlotNode(
                    op="protect", name=f"protect[{copying.what} @{show(devices)}]", devices=devices,
                    reads=copying.slots, writes=slots, stream=by.stream, origin=(by.by,),
                    nbytes=copying.nbytes,
                )  # fmt: skip
                edit.before(0, node)
                sent += [node] if slots else []
    if sent:  # late, so that a host that issues all streams has issued the rest of the step before it waits
        end = next(place for place, node in enumerate(state.sequence) if node.op == "norm")
        edit.before(end, mirror(state, asked, sent))
    edit.values |= {slot: Slot(nbytes=0) for node in sent for slot in node.writes}  # it lies on the host
    return edit.apply()


def everything_written_is_copied(state: LoweringState) -> Iterator[str]:
    """Yield each bucket or buffer that a step writes and that is not copied before."""
    if state.graph.protection is None or not state.settings.trains:
        return
    copied: set[SlotId] = set()
    for node in state.sequence:
        if node.op == "protect":
            copied.update(node.reads)
        for slot in node.writes:
            if slot.kind in ("param", "buffer") and slot in state.residents and slot not in copied:
                tied = state.buckets[slot.owner].siblings if slot.kind == "param" else ()
                if not any(param_slot(name) in copied for name in tied):
                    yield f"{node.name} writes {slot}, which is not copied before"


def bucket_copies(state: LoweringState, written: set[SlotId]) -> Iterator[Copying]:
    """Yield the trained buckets. The copies of a tied parameter are one of them, held by more devices."""
    seen: set[str] = set()
    for bucket in state.buckets.values():
        if param_slot(bucket.name) not in written or bucket.name in seen:
            continue
        family = bucket.family(state.buckets)
        seen.update(member.name for member in family)
        optimizer_state = state_slot(bucket.name)
        trained = 0 if bucket.has_master else bucket.elements() * bucket.itemsize
        yield Copying(
            what=bucket.name,
            chunks=tuple(chunk for member in family for chunk in member.chunks),
            slots=(param_slot(bucket.name), optimizer_state),
            named=bucket.pieces[0].name,
            owned_as=bucket.update.ownership,
            nbytes=trained + state.residents[optimizer_state].everywhere,
        )


def buffer_copies(state: LoweringState, written: set[SlotId]) -> Iterator[Copying]:
    """Yield the buffers that each chunk writes. All its devices hold the first one's after the step."""
    seen: set[str] = set()
    placements = placements_of(state.graph)
    for chunk in state.graph.outline.chunks:
        names = [name for name in chunk.mutated if buffer_slot(name) in written and name not in seen]
        seen.update(names)
        slots = tuple(map(buffer_slot, names))
        if names:
            devices = placements[chunk.name].devices
            yield Copying(
                what=f"buffers of {chunk.name}",
                chunks=(chunk.name,),
                slots=slots,
                named=names[0],
                owned_as=Ownership(devices=devices, groups=(devices,)),
                nbytes=sum(state.residents[slot].nbytes for slot in slots),
            )


def holders(owned: Mapping[Share, list[int]], asked: Protection) -> tuple[Devices, Devices]:
    """Return the devices that copy their elements, and those that send the copy on as well."""
    # Where another owner is far enough away, it copies the same elements, and none has to be sent.
    keep, send = set[int](), set[int]()
    for devices in owned.values():
        first = devices[0]
        far = next((d for d in devices if asked.domain(d) != asked.domain(first)), None)
        if not asked.copies or far is not None:
            keep |= {first} if far is None or not asked.copies else {first, far}
        else:
            send.add(first)
    return tuple(sorted(keep)), tuple(sorted(send))


def protected_by(state: LoweringState, copying: Copying) -> StateCopies:
    """Return what protects a part of the state. Refuse a strategy that leaves it out."""
    protected = state.graph.chosen(lambda options: options.protect)
    copies = next((protected[chunk] for chunk in copying.chunks if chunk in protected), None)
    if copies is None:
        last = max(copies.by for copies in protected.values())
        raise ScheduleError(
            "a part of the state is not protected",
            by=state.graph.directives[last].title,
            facts={"written": copying.named, "region": copying.chunks[0]},
            hint="protect(at()) selects everything that a step writes",
        )
    return copies


def mirror(state: LoweringState, asked: Protection, sent: list[SlotNode]) -> SlotNode:
    """Return the node in which each device gives its copies to the next machine or device of a ring."""
    everyone = state.graph.devices()
    domains = list(asked.domains(everyone).values())
    if len(domains) < 2 or len(set(map(len, domains))) > 1:
        raise ScheduleError(
            f"there is no other {asked.apart} for a copy" if len(domains) < 2 else "machines are not alike",
            by=state.graph.directives[sent[0].origin[0]].title,
            facts={
                "devices": show(everyone),
                f"{asked.apart}s": "; ".join(map(show, domains)),
            },
            hint="use as many devices on each machine, and two machines at least, or copies=0",
        )
    return SlotNode(
        op="mirror",
        name=f"mirror[@{show(everyone)}]",
        devices=everyone,
        groups=tuple(zip(*domains, strict=True)),
        reads=tuple(dict.fromkeys(slot for node in sent for slot in node.writes)),
        stream=sent[0].stream,
        origin=sent[0].origin,
    )
