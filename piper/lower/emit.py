"""Turns the sequence of nodes into plans: the instructions of each program, its streams and communicators."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from piper.ir.devices import Devices
from piper.ir.graph import Graph
from piper.ir.ids import SlotId, Tags, state_slot
from piper.ir.node import Compute, Transfer
from piper.ir.step_sums import step_sums
from piper.lower.events import Keeps, synchronised
from piper.lower.instructions import Emission, emit_transfer, instr_for
from piper.lower.placements import channels, classes_of, first_nodes
from piper.lower.state import LoweringState
from piper.lower.validate import cells_per_device, parts_of
from piper.plan.instr import Instr
from piper.plan.plan import PlacedChunk, Plan, Plans, Slot
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
