"""Communication inside regions: collectives of sharded regions, and rows that travel to experts and back."""

from piper.ir.chunk import Chunk, Collective, Phase
from piper.ir.chunk_options import block_rows
from piper.ir.ids import Pass, SlotId
from piper.ir.mesh import Axis
from piper.ir.node import Collect, Counts, Exchange
from piper.lower.placements import ChunkPlacement
from piper.lower.value_table import Flow, Template, output_slot, splits_slot
from piper.plan.plan import Slot

IN_FRONT: tuple[Phase, ...] = ("B", "BI")  # whichever the graph has: values travel in the first half


def exchange_forward(flow: Flow, chunk: Chunk, inputs: list[SlotId]) -> None:
    """Add the forward exchange of rows: to their experts, after the counts, or back from them."""
    splits = splits_slot(chunk)
    if chunk.kind == "route":
        placement = flow.placements[chunk.name]
        policy, sent = placement.policy, chunk.input_specs[0].shape[0]
        block = block_rows(sent, policy.ways, policy.capacity)
        places = 8 * sent + 25 * block * policy.ways  # where each row lies on its way: see `Blocks`
        flow.values[splits] = Slot(nbytes=places if block else 16 * chunk.experts)
        written = [splits, output_slot(chunk.name, 1)]
        if policy.may_overflow:
            written.append(SlotId("overflows", chunk.name))
            flow.values[written[-1]] = Slot(nbytes=1)
        counts = Counts(
            run=Pass(phase="F", chunk=chunk.name),
            devices=placement.devices,
            axis=experts_of(placement),
            stream=placement.policy.exchange_stream,
            reads=(inputs[1],),
            writes=tuple(written),
            origin=placement.origin,
        )
        flow.templates.append(Template(node=counts, chunk=chunk.name))
    outward = chunk.kind == "route"
    exchange(flow, chunk, "F", outward, (inputs[0], splits), output_slot(chunk.name, 0))


def exchange(
    flow: Flow, chunk: Chunk, phase: Phase, outward: bool, reads: tuple[SlotId, ...], written: SlotId
) -> None:
    """Add one all-to-all of rows within each expert group."""
    placement = flow.placements[chunk.name]
    node = Exchange(
        run=Pass(phase=phase, chunk=chunk.name),
        devices=placement.devices,
        axis=experts_of(placement),
        outward=outward,
        reads=reads,
        writes=(written,),
        stream=placement.policy.exchange_stream,
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase=phase))


def experts_of(placement: ChunkPlacement) -> Axis:
    """Return the axis over which the experts of a region are sharded."""
    experts = placement.mesh.experts
    assert experts is not None, f"{placement.chunk} holds all experts"
    return experts


def collect(flow: Flow, chunk: Chunk, phase: Phase, how: Collective, read: SlotId, written: SlotId) -> None:
    """Add one phase of a collective: it reads one value and writes one."""
    placement = flow.placements[chunk.name]
    node = Collect(
        run=Pass(phase=phase, chunk=chunk.name),
        devices=placement.devices,
        axis=placement.mesh.axis(how.axis),
        how=how,
        reads=(read,),
        writes=(written,),
        stream=next(axis.stream for axis in placement.policy.axes if axis.axis == how.axis),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase=phase))
