"""From the line to plans: each program's instructions, on its streams, over its communicators."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

from piper.ir.chunk import Chunk
from piper.ir.devices import Devices, groups_of, show
from piper.ir.node import (
    Accumulate,
    Add,
    Broadcast,
    Compute,
    Counts,
    Exchange,
    Gather,
    Load,
    Node,
    Norm,
    Reduce,
    Total,
    Transfer,
    Update,
)
from piper.lower.buckets import homes_of
from piper.lower.programs import Channel, channels, classes_of
from piper.lower.reductions import final_gradient
from piper.lower.settle import cells_per_device, parts_of
from piper.lower.sync import Draft, synchronised
from piper.lower.work import Work, prefix_of
from piper.plan.plan import Comm, Plan, Plans, Slot


@dataclass(slots=True)
class Emission:
    """The programs under construction: a list of drafts for each class of devices."""

    work: Work
    classes: list[Devices]
    chunks: dict[str, Chunk]
    drafts: list[list[Draft]]
    comms: dict[tuple[tuple[Devices, ...], str], Comm] = field(default_factory=dict)
    pairs: dict[str, Comm] = field(default_factory=dict)
    classes_in: dict[Devices, list[int]] = field(default_factory=dict)
    class_of: dict[int, int] = field(default_factory=dict)
    comm_cache: dict[tuple[str, ...], tuple[str | None, int]] = field(default_factory=dict)

    def within(self, devices: Devices) -> list[int]:
        """The classes that make up a set of devices."""
        if devices not in self.classes_in:
            self.classes_in[devices] = list(dict.fromkeys(self.class_of[device] for device in devices))
        return self.classes_in[devices]

    def size(self, value: str) -> int:
        """The bytes of a value, with the storages it shares."""
        slot = self.work.values.get(prefix_of(value)) or self.work.residents[value]
        return slot.nbytes + sum(nbytes for _, nbytes in slot.shares)

    def comm(
        self, key: tuple[str, ...], groups: Callable[[], tuple[Devices, ...]], stream: str
    ) -> tuple[str | None, int]:
        """The communicator of these groups on this stream and the size of a group; none for a group of one."""
        if key not in self.comm_cache:
            made = groups()
            if len(made[0]) == 1:
                self.comm_cache[key] = (None, 1)
            else:
                label = f"{show(made[0])}{f'x{len(made)}' if len(made) > 1 else ''}:{stream}"
                taken = {comm.name for comm in self.comms.values()}
                if (made, stream) not in self.comms:
                    while label in taken:
                        label += "'"
                    self.comms[made, stream] = Comm(name=label, kind="groups", groups=made)
                self.comm_cache[key] = (self.comms[made, stream].name, len(made[0]))
        return self.comm_cache[key]


def emit(work: Work) -> Plans:
    """Cut the line into one plan per distinct program."""
    classes = classes_of(device_sets(work))
    emission = Emission(work, classes, work.graph.chunks, [[] for _ in classes])
    emission.class_of = {device: number for number, devices in enumerate(classes) for device in devices}
    for node in work.line:
        draft_node(emission, node)
    plans = []
    for devices, drafts in zip(classes, emission.drafts, strict=True):
        slots = slots_of(drafts, work)
        used = {slot for draft in drafts for slot in (*draft.reads, *draft.writes) if slot in work.residents}
        held = {name: work.residents[name] for name in residents_held(work, devices[0], used)}
        plans.append(
            Plan(devices=devices, instrs=synchronised(drafts, slots, work.residents), slots=slots, residents=held)
        )
    outline = work.graph.outline
    slices = len(homes_of(work.graph)[outline.loss.chunk].devices) * parts_of(work.graph, outline.loss.chunk)
    comms = {comm.name: comm for comm in (*emission.comms.values(), *emission.pairs.values())}
    return Plans(
        plans=tuple(plans),
        comms=comms,
        buckets=work.buckets,
        seed=1.0 if outline.weight else 1.0 / slices,
        weighted=outline.weight is not None,
        cells=cells_per_device(work.graph),
        axes=dict(axis for axes in work.graph.parts.values() for axis in axes),
        why=work.why,
    )


def device_sets(work: Work) -> Iterator[Devices]:
    """Every set of devices that does something together, and every role in a transfer."""
    seen: dict[object, None] = {}
    for node in work.line:
        if not isinstance(node, Transfer):
            if node.devices not in seen:
                seen[node.devices] = None
                yield node.devices
            continue
        key = (node.source, node.target, node.stream, node.sliced)
        if key not in seen:
            seen[key] = None
            for channel in channels(*key):
                yield channel.senders
                yield channel.receivers


def slots_of(drafts: Iterable[Draft], work: Work) -> dict[str, Slot]:
    """The size of every slot a program uses within the step."""
    slots: dict[str, Slot] = {}
    for draft in drafts:
        for name in draft.writes:
            if name in slots or name in work.residents:
                continue
            prefix = prefix_of(name)
            slot = work.values[prefix] if prefix in work.values else Slot(nbytes=draft.nbytes)
            if slot.shares:
                suffix = name[len(prefix) :]
                slot = replace(slot, shares=tuple((storage + suffix, nbytes) for storage, nbytes in slot.shares))
            slots[name] = slot
    return slots


def residents_held(work: Work, device: int, used: set[str]) -> Iterator[str]:
    """What a device holds between steps: what it uses, and the optimizer state of its buckets."""
    states = {f"{b.name}.state" for b in work.buckets.values() if device in b.devices}
    for name in work.residents:
        if name in used or name in states:
            yield name


def draft_node(emission: Emission, node: Node) -> None:
    """Add a node's instructions to the programs that run it."""
    if isinstance(node, Transfer):
        draft_transfer(emission, node)
        return
    for number in emission.within(node.devices):
        emission.drafts[number].append(draft_for(emission, node, emission.classes[number][0]))


def draft_for(emission: Emission, node: Node, device: int) -> Draft:
    """The instruction of a node on one of its devices."""
    draft = Draft(op="compute", node=node.name, stream=node.stream, reads=node.reads, writes=node.writes)
    work = emission.work
    match node:
        case Compute():
            spec = emission.chunks[node.chunk].phases[node.phase]
            draft.arg, draft.part, draft.keeps = f"{node.phase} {node.chunk}", node.part, node.keeps
            draft.workspace = spec.workspace
        case Load():
            draft.op, draft.arg, draft.part, draft.devices = "load", node.batch_field, node.part, node.devices
            draft.nbytes = emission.size(node.writes[0])
        case Add():
            draft.op = "add"
        case Accumulate():
            draft.op, draft.arg = "accumulate", node.writes[0]
        case Counts() | Exchange():
            draft_exchange(emission, node, draft)
        case Gather():
            bucket = work.buckets[node.bucket]
            draft.op, draft.arg = "gather", node.bucket
            draft.comm, size = emission.comm(("b", node.bucket, node.stream), lambda: bucket.groups, node.stream)
            draft.nbytes = bucket.nbytes * (size - 1) // size
        case Reduce():
            draft_reduce(emission, node, draft, device)
        case Norm():
            draft.op = "norm"
        case Total():
            draft.op = "total"
            draft.comm, _ = emission.comm(("total",), lambda: (node.devices,), node.stream)
            draft.nbytes = emission.size(node.writes[0])
        case Update():
            draft.op = "update"
        case Broadcast():
            draft.op, draft.arg = "broadcast", node.chunk
            draft.comm, _ = emission.comm(("set", show(node.devices), node.stream), lambda: (node.devices,), node.stream)
            draft.nbytes = sum(emission.size(value) for value in node.writes)
        case Transfer():
            raise AssertionError("transfers have two sides")
        case _:
            assert_never(node)
    return draft


def draft_exchange(emission: Emission, node: Counts | Exchange, draft: Draft) -> None:
    """An all-to-all within each expert group: of row counts, or of rows."""
    ways = node.ways
    key = ("ways", show(node.devices), str(ways), node.stream)
    draft.comm, _ = emission.comm(key, lambda: groups_of(node.devices, ways), node.stream)
    draft.part = node.part
    draft.nbytes = emission.size(node.writes[-1]) * (ways - 1) // ways
    if isinstance(node, Counts):
        draft.op, draft.arg = "counts", node.chunk
    else:
        draft.op, draft.arg = "exchange", f"{'out' if node.outward else 'back'} {node.chunk}"


def draft_reduce(emission: Emission, node: Reduce, draft: Draft, device: int) -> None:
    """A reduction over a bucket's replicas, or over the copies of a tied parameter."""
    work = emission.work
    bucket = work.buckets[node.bucket]
    draft.op, draft.arg = ("reduce_scatter" if node.scatter else "all_reduce"), node.bucket
    if node.run == "tied":
        family = [bucket, *(work.buckets[name] for name in bucket.siblings)]
        mine = next(member for member in family if device in member.devices)
        rows = tuple(zip(*(member.devices for member in family), strict=True))
        draft.comm, size = emission.comm(("tied", node.bucket), lambda: rows, node.stream)
        slot = final_gradient(mine)
        draft.reads, draft.writes = tuple(s for s in node.reads if s == slot), (slot,)
        draft.nbytes = 2 * emission.size(slot) * (size - 1) // size
        return
    draft.comm, size = emission.comm(("b", node.bucket, node.stream), lambda: bucket.groups, node.stream)
    whole = bucket.nbytes * (size - 1) // size
    draft.nbytes = whole if node.scatter else 2 * whole


def draft_transfer(emission: Emission, node: Transfer) -> None:
    """Sends where the value is, receives where it goes, and the pieces joined where it comes in several."""
    prefix = f"{node.stream}." if node.stream else ""
    whole = emission.size(node.reads[0])
    joined: dict[int, list[str]] = {}
    for channel in channels(node.source, node.target, node.stream, node.sliced):
        start, stop, of = channel.rows
        nbytes = whole * (stop - start) // of
        arg = "" if (start, stop) == (0, of) else f"{start}:{stop}/{of}"
        number, pieces = channel.piece
        arrived = node.writes[0] if pieces == 1 else f"{node.writes[0]}.piece{number}"
        if channel.local:
            for at in emission.within(channel.senders):
                emission.drafts[at].append(
                    Draft(op="copy", node=node.name, stream="compute", reads=node.reads, writes=(arrived,), arg=arg, nbytes=nbytes)
                )
        else:
            comm = pair_comm(emission, channel)
            for at in emission.within(channel.senders):
                emission.drafts[at].append(
                    Draft(op="send", node=node.name, stream=f"{prefix}send", reads=node.reads, writes=(), comm=comm, arg=arg, nbytes=nbytes)
                )
            for at in emission.within(channel.receivers):
                emission.drafts[at].append(
                    Draft(op="recv", node=node.name, stream=f"{prefix}recv", reads=(), writes=(arrived,), comm=comm, nbytes=nbytes)
                )
        if pieces > 1:
            for at in emission.within(channel.receivers):
                joined.setdefault(at, []).append(arrived)
    for at, arrived_pieces in joined.items():
        emission.drafts[at].append(
            Draft(op="concat", node=node.name, stream="compute", reads=tuple(arrived_pieces), writes=node.writes)
        )


def pair_comm(emission: Emission, channel: Channel) -> str:
    """The communicator of a channel's pairs."""
    if channel.name not in emission.pairs:
        emission.pairs[channel.name] = Comm(name=channel.name, kind="pairs", groups=channel.pairs)
    return channel.name
