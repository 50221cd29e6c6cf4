"""Turns the sequence of nodes into plans: the instructions of each program, its streams and communicators."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from piper.ir.chunk import Chunk
from piper.ir.devices import Devices, show
from piper.ir.graph import Graph
from piper.ir.ids import SlotId, Tags, state_slot
from piper.ir.node import COMPUTE_STREAM, Compute, SlotNode, Transfer
from piper.ir.step_sums import step_sums
from piper.lower.events import Keeps, synchronised
from piper.lower.placements import channels, classes_of, first_nodes
from piper.lower.reductions import GRADIENTS
from piper.lower.state import LoweringState
from piper.lower.validate import cells_per_device, parts_of
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import Op, Payload, Rows
from piper.plan.plan import Comm, PlacedChunk, Plan, Plans, Slot
from piper.plan.protected import MIRRORED
from piper.plan.prove import prove
from piper.proof.values import prove_values


def emit(state: LoweringState) -> LoweringState:
    """Cut the sequence of nodes into one plan for each distinct program.

    F[PP=0]@0  transfer  F[PP=1]@1
    -->
    0: F[PP=0], send     1: recv, F[PP=1]
    """
    classes = classes_of(device_sets(state))
    emission = Emission(
        state=state,
        classes=classes,
        chunks=state.graph.chunks,
        programs=[[] for _ in classes],
        keeps=[{} for _ in classes],
        class_of={device: number for number, devices in enumerate(classes) for device in devices},
    )
    for node in state.sequence:
        if isinstance(node, Transfer):
            emit_transfer(emission, node)
        else:
            for number in emission.within(node.devices):
                if isinstance(node, Compute) and node.keeps:
                    emission.keeps[number][len(emission.programs[number])] = node.keeps
                emission.programs[number].append(instr_for(emission, node, number))
    outline = state.graph.outline
    mesh = state.graph.mesh(first_nodes(state.graph)[outline.loss.chunk])
    slices = mesh.slices * parts_of(state.graph, outline.loss.chunk)
    plans = Plans(
        plans=tuple(
            plan_of(state, *program)
            for program in zip(classes, emission.programs, emission.keeps, strict=True)
        ),
        comms={comm.name: comm for comm in (*emission.comms.values(), *emission.pairs.values())},
        buckets=state.buckets,
        seed=1.0 if outline.weight else 1.0 / slices,
        weighted=outline.weight is not None,
        copies=mesh.degree,
        sums={each.name: each.length for each in step_sums(state.graph, clip=state.settings.clip)},
        cells=cells_per_device(state.graph),
        axes=dict(axis for axes in state.graph.parts.values() for axis in axes),
        chunks=placed_chunks(state.graph),
        why=state.why,
        protection=state.graph.protection if state.settings.trains else None,
    )
    return replace(state, plans=plans)


def placed_chunks(graph: Graph) -> dict[str, PlacedChunk]:
    """Return each chunk with its devices, and with those of the microbatches that run elsewhere."""
    usual = {chunk: node.devices for chunk, node in first_nodes(graph).items()}
    elsewhere: dict[str, dict[Tags, Devices]] = {chunk: {} for chunk in usual}
    for node in graph.nodes.values():
        if node.devices is not usual[node.chunk] and node.devices != usual[node.chunk]:
            elsewhere[node.chunk][node.part] = node.devices
    return {
        chunk.name: PlacedChunk(tags=chunk.tags, devices=usual[chunk.name], elsewhere=elsewhere[chunk.name])
        for chunk in graph.outline.chunks
    }


def every_device_has_a_plan(state: LoweringState) -> Iterator[str]:
    """Yield each device that has no plan, or several."""
    planned = [] if state.plans is None else sorted(d for plan in state.plans for d in plan.devices)
    if planned != list(state.graph.devices()):
        yield f"there are plans for {planned}, and nodes on {state.graph.devices()}"


def plans_can_run(state: LoweringState) -> Iterator[str]:
    """Prove the plans of all devices together: first their order, then the values they compute."""
    assert state.plans is not None, "they are emitted"
    prove(state.plans)
    prove_values(state.plans, state.graph, clip=state.settings.clip, whole=state.settings.whole)
    yield from ()


def device_sets(state: LoweringState) -> Iterator[Devices]:
    """Yield the devices of every node, and the sender and receiver sets of every transfer."""
    yield from dict.fromkeys(node.devices for node in state.sequence if not isinstance(node, Transfer))
    transfers = (node for node in state.sequence if isinstance(node, Transfer))
    for pair in dict.fromkeys((n.source, n.target, n.stream, n.sliced, n.degrees) for n in transfers):
        for channel in channels(*pair):
            yield channel.senders
            yield channel.receivers


def plan_of(state: LoweringState, devices: Devices, pending: list[Instr], keeps: Keeps) -> Plan:
    slots = slots_of(pending, state)
    used = {slot for instr in pending for slot in (*instr.reads, *instr.writes)}
    # A device holds what it uses, and its optimizer state.
    used |= {state_slot(b.name) for b in state.held_buckets.values() if devices[0] in b.devices}
    residents = {name: slot for name, slot in state.residents.items() if name in used}
    instrs = synchronised(pending, keeps, slots)
    return Plan(devices=devices, instrs=instrs, slots=slots, residents=residents)


def slots_of(pending: Iterable[Instr], state: LoweringState) -> dict[SlotId, Slot]:
    """Return the size of every slot that a program uses within the step."""
    slots: dict[SlotId, Slot] = {}
    for instr in pending:
        for written in instr.writes:
            if written in slots or written in state.residents:
                continue
            slot = state.values[written.base] if written.piece < 0 else Slot(nbytes=instr.nbytes)
            if slot.shares:
                shares = tuple((storage.at(written.part), nbytes) for storage, nbytes in slot.shares)
                slot = replace(slot, shares=shares)
            slots[written] = slot
    return slots


@dataclass(slots=True, kw_only=True)
class Emission:
    """The programs under construction: a list of instructions for each class of devices."""

    state: LoweringState
    classes: list[Devices]
    chunks: dict[str, Chunk]
    programs: list[list[Instr]]
    keeps: list[dict[int, tuple[SlotId, ...]]]  # of each program, by place: values whose storage is used
    class_of: dict[int, int]  # device -> the number of its class
    comms: dict[tuple[tuple[Devices, ...], str], Comm] = field(default_factory=dict)
    pairs: dict[str, Comm] = field(default_factory=dict)
    classes_in: dict[Devices, list[int]] = field(default_factory=dict)
    comm_names: dict[tuple[int, str], tuple[tuple[Devices, ...], str]] = field(default_factory=dict)
    # ^ by identity, the groups kept alive: hashing hundreds of sets takes long
    begun: set[tuple[int, SlotId]] = field(default_factory=set)  # (class, total): it has something to reduce
    given: set[tuple[int, SlotId]] = field(default_factory=set)  # (class, gradient): a backward wrote it
    flat: set[tuple[int, SlotId]] = field(default_factory=set)  # and those it wrote as one flat tensor

    def within(self, devices: Devices) -> list[int]:
        """Return the numbers of the device classes that make up a set of devices."""
        if devices not in self.classes_in:
            self.classes_in[devices] = list(dict.fromkeys(self.class_of[device] for device in devices))
        return self.classes_in[devices]

    def size(self, value: SlotId) -> int:
        """Return the bytes of a value, including the storages it shares."""
        slot = self.state.values.get(value.base) or self.state.residents[value]
        return slot.nbytes + sum(nbytes for _, nbytes in slot.shares)

    def comm(self, groups: tuple[Devices, ...], stream: str) -> str | None:
        """Return the name of the communicator of these groups on this stream. None: of one device each."""
        if len(groups[0]) == 1:
            return None
        key = id(groups), stream
        if key not in self.comm_names:
            if (groups, stream) not in self.comms:
                label = f"{show(groups[0])}{f'x{len(groups)}' if len(groups) > 1 else ''}:{stream}"
                taken = {comm.name for comm in self.comms.values()}
                while label in taken:
                    label += "'"
                self.comms[groups, stream] = Comm(name=label, kind="groups", groups=groups)
            self.comm_names[key] = groups, self.comms[groups, stream].name
        return self.comm_names[key][1]


def instr_for(emission: Emission, node: Compute | SlotNode, number: int) -> Instr:
    """Return the instruction of a node on one class of its devices."""
    if isinstance(node, Compute):
        return Instr(
            op="compute",
            node=node.name,
            stream=node.stream,
            reads=node.reads,
            writes=node.writes,
            payload=node.run,
            workspace=compute_workspace(emission, node, number),
        )
    reads, writes, nbytes, workspace = node.reads, node.writes, node.nbytes, node.workspace
    if node.op in ("all_reduce", "reduce_scatter"):
        reads, writes, workspace = reduction(emission, node, number)
    elif node.op == "accumulate":
        emission.begun.add((number, writes[0]))
        if len(reads) == 1 and (number, reads[0]) in emission.flat:
            workspace = -emission.size(reads[0])  # the sum begins in the memory of its first term
    elif node.op == "mirror":
        copied = {slot: d.nbytes for d in emission.programs[number] if d.op == "protect" for slot in d.writes}
        reads = tuple(slot for slot in reads if slot in copied)
        nbytes = sum(copied[slot] for slot in reads)
        workspace = 2 * min(nbytes, MIRRORED)
    return Instr(
        op=cast(Op, node.op),
        node=node.name,
        stream=COMPUTE_STREAM if node.op == "slice" else node.stream,
        reads=reads,
        writes=writes,
        comm=emission.comm(node.groups, node.stream) if node.groups else None,
        payload=cast(Payload, node.payload),
        nbytes=nbytes,
        workspace=workspace,
    )


def compute_workspace(emission: Emission, node: Compute, number: int) -> int:
    """Return the workspace of a phase in bytes, and record which gradients it writes, and which are flat."""
    # A gradient in the same bucket that is made elsewhere is copied there: both are in memory at the end.
    spec = emission.chunks[node.chunk].phases[node.phase]
    workspace = spec.workspace
    for slot in node.writes:
        if slot.kind in GRADIENTS:
            emission.given.add((number, slot))
            pieces = emission.state.buckets[slot.owner].pieces
            if any(piece.name in spec.in_place for piece in pieces):
                emission.flat.add((number, slot))
                if slot.kind == "grad":
                    emission.begun.add((number, slot))
                apart = [p for p in pieces if p.name in spec.grad_params and p.name not in spec.in_place]
                itemsize = emission.state.buckets[slot.owner].itemsize
                workspace += sum(piece.numel for piece in apart) * itemsize
    return workspace


def reduction(
    emission: Emission, node: SlotNode, number: int
) -> tuple[tuple[SlotId, ...], tuple[SlotId, ...], int]:
    """Return what a program reads and writes in a sum of gradients, and its workspace."""
    if len(node.writes) > 1:  # the copies of a tied parameter, of which each device has one
        device, buckets = emission.classes[number][0], emission.state.buckets
        own = tuple(slot for slot in node.writes if device in buckets[slot.owner].devices)
        return tuple(slot for slot in node.reads if slot in own), own, node.workspace
    reads, workspace, scatters = node.reads, node.workspace, node.op == "reduce_scatter"
    here = (number, reads[0])
    if reads[0].kind in GRADIENTS:  # else it is what another reduction gives
        summed, written = here in emission.begun, here in emission.given
        if scatters:
            flat, bucket = summed or here in emission.flat, emission.state.buckets[reads[0].owner]
            workspace = scatter_workspace(bucket, node, flat=flat, given=written)
        if not (summed or (written and scatters)):
            reads = reads[1:]  # no backward here gives it anything: it adds nothing, but gets its part
    return reads, node.writes, workspace


def scatter_workspace(bucket: Bucket, node: SlotNode, *, flat: bool, given: bool) -> int:
    """Return the bytes of workspace that a reduce-scatter needs in addition to its slots.

    It flattens the gradients in the type they travel in, unless compiled code or an accumulation has done so;
    a device without any gives zeros. It also holds this device's reduced shard before that is added to the
    shard accumulated so far, or cast to its type.
    """
    again = len(node.reads) > 1
    cast = (bucket.precision.sum_dtype if flat else bucket.dtype) != bucket.precision.travel_dtype
    apart = cast or (not flat and (len(bucket.pieces) > 1 or not given))
    shard = again or bucket.precision.sum_dtype != bucket.precision.travel_dtype
    kept = bucket.elements(bucket.reductions[0].gets)
    elements = (bucket.numel if apart else 0) + (kept if shard else 0)
    return elements * bucket.precision.travel_itemsize


def emit_transfer(emission: Emission, node: Transfer) -> None:
    """Append the sends and receives of a transfer, and the copies that join a value received in pieces."""
    name = node.name
    prefix = f"{node.stream}." if node.stream else ""
    whole = emission.size(node.reads[0])
    in_pieces: dict[int, int] = {}  # by class: how many a value arrives in
    for channel in channels(node.source, node.target, node.stream, node.sliced, node.degrees):
        start, stop, of = channel.rows
        nbytes = whole * (stop - start) // of
        rows = None if (start, stop) == (0, of) else Rows(start=start, stop=stop, of=of)
        number, pieces = channel.piece
        arrived = node.writes if pieces == 1 else (node.writes[0].of_piece(number),)
        comm = None if channel.local else channel.name
        if comm is not None and comm not in emission.pairs:
            pairs = tuple(zip(channel.senders, channel.receivers, strict=True))
            emission.pairs[comm] = Comm(name=comm, kind="pairs", groups=pairs)
        send = Instr(
            op="copy" if channel.local else "send",
            node=name,
            stream=COMPUTE_STREAM if channel.local else f"{prefix}send",
            reads=node.reads,
            writes=arrived if channel.local else (),
            comm=comm,
            payload=rows,
            nbytes=nbytes,
        )
        for at in emission.within(channel.senders):
            emission.programs[at].append(send)
        receivers = emission.within(channel.receivers)
        if not channel.local:
            stream = f"{prefix}recv"
            recv = Instr(op="recv", node=name, stream=stream, writes=arrived, comm=comm, nbytes=nbytes)
            for at in receivers:
                emission.programs[at].append(recv)
        if pieces > 1:
            in_pieces |= dict.fromkeys(receivers, pieces)
    for at, pieces in in_pieces.items():
        reads = tuple(node.writes[0].of_piece(number) for number in range(pieces))
        join = Instr(op="concat", node=name, stream=COMPUTE_STREAM, reads=reads, writes=node.writes)
        emission.programs[at].append(join)
