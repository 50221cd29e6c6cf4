"""Turns the sequence of nodes into plans: the instructions of each program, its streams and communicators."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.ids import SlotId, Tags
from piper.ir.node import Transfer
from piper.lower.events import PendingInstr, synchronised
from piper.lower.instructions import Emission, draft_node
from piper.lower.placements import layouts_of
from piper.lower.programs import channels, classes_of
from piper.lower.state import LoweringState
from piper.lower.validate import cells_per_device, parts_of
from piper.plan.plan import PlacedChunk, Plan, Plans, Slot
from piper.plan.prove import prove
from piper.proof.values import prove_values


def emit(work: LoweringState) -> LoweringState:
    """Cut the sequence of nodes into one plan for each distinct program.

    F[PP=0]@0  transfer  F[PP=1]@1
    -->
    0: F[PP=0], send     1: recv, F[PP=1]
    """
    classes = classes_of(device_sets(work))
    emission = Emission(
        work=work,
        classes=classes,
        chunks=work.graph.chunks,
        drafts=[[] for _ in classes],
        class_of={device: number for number, devices in enumerate(classes) for device in devices},
    )
    for node in work.sequence:
        draft_node(emission, node)
    outline = work.graph.outline
    placement = layouts_of(work.graph)[0].placements[outline.loss.chunk]
    slices = placement.slices * parts_of(work.graph, outline.loss.chunk)
    plans = Plans(
        plans=tuple(plan_of(work, *program) for program in zip(classes, emission.drafts, strict=True)),
        comms={comm.name: comm for comm in (*emission.comms.values(), *emission.pairs.values())},
        buckets=work.buckets,
        seed=1.0 if outline.weight else 1.0 / slices,
        weighted=outline.weight is not None,
        copies=placement.policy.degree,
        cells=cells_per_device(work.graph),
        axes=dict(axis for axes in work.graph.parts.values() for axis in axes),
        chunks=placed_chunks(work.graph),
        why=work.why,
        protection=work.graph.protection if work.settings.trains else None,
    )
    return replace(work, plans=plans)


def placed_chunks(graph: Graph) -> dict[str, PlacedChunk]:
    """Return each chunk with its devices, and with those of the microbatches that run elsewhere."""
    first, *others = layouts_of(graph)
    usual = {chunk: placement.devices for chunk, placement in first.placements.items()}
    elsewhere: dict[str, dict[Tags, Devices]] = {chunk: {} for chunk in usual}
    for layout in others:
        for cell in graph.index.cells:
            devices = layout.placements[cell.chunk].devices
            if cell.part in layout.parts and devices != usual[cell.chunk]:
                elsewhere[cell.chunk][cell.part] = devices
    return {
        chunk.name: PlacedChunk(tags=chunk.tags, devices=usual[chunk.name], elsewhere=elsewhere[chunk.name])
        for chunk in graph.outline.chunks
    }


def plans_can_run(work: LoweringState) -> Iterator[str]:
    """Prove the plans of all devices together: first their order, then the values they compute."""
    assert work.plans is not None, "they are emitted"
    prove(work.plans)
    prove_values(work.plans, work.graph, clip=work.settings.clip, whole=work.settings.whole)
    yield from ()


def device_sets(work: LoweringState) -> Iterator[Devices]:
    """Yield the devices of every node, and the sender and receiver sets of every transfer."""
    seen: set[object] = set()
    for node in work.sequence:
        if not isinstance(node, Transfer):
            if node.devices not in seen:
                seen.add(node.devices)
                yield node.devices
            continue
        key = (node.source, node.target, node.stream, node.sliced, node.degrees)
        if key not in seen:
            seen.add(key)
            for channel in channels(*key):
                yield channel.senders
                yield channel.receivers


def plan_of(work: LoweringState, devices: Devices, drafts: list[PendingInstr]) -> Plan:
    """Return the plan of one program."""
    slots = slots_of(drafts, work)
    used = {slot for draft in drafts for slot in (*draft.reads, *draft.writes) if slot in work.residents}
    held = {name: work.residents[name] for name in residents_held(work, devices[0], used)}
    instrs = synchronised(drafts, slots)
    return Plan(devices=devices, instrs=instrs, slots=slots, residents=held)


def slots_of(drafts: Iterable[PendingInstr], work: LoweringState) -> dict[SlotId, Slot]:
    """Return the size of every slot that a program uses within the step."""
    slots: dict[SlotId, Slot] = {}
    for draft in drafts:
        for made in draft.writes:
            if made in slots or made in work.residents:
                continue
            slot = work.values[made.base] if made.piece < 0 else Slot(nbytes=draft.nbytes)
            if slot.shares:
                shares = tuple((storage.at(made.part), nbytes) for storage, nbytes in slot.shares)
                slot = replace(slot, shares=shares)
            slots[made] = slot
    return slots


def residents_held(work: LoweringState, device: int, used: set[SlotId]) -> Iterator[SlotId]:
    """Yield the slots that a device holds between steps: those it uses, and its optimizer state."""
    states = {SlotId("state", b.name) for b in work.held_buckets.values() if device in b.devices}
    for name in work.residents:
        if name in used or name in states:
            yield name
