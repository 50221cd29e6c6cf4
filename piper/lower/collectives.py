"""Collectives inside sharded regions: nodes between the pieces of a region, on groups of its devices."""

from piper.ir.chunk import Chunk, Collective, Phase
from piper.ir.ids import SlotId
from piper.ir.node import Collect
from piper.lower.value_table import Flow, Template


def collect(flow: Flow, chunk: Chunk, phase: Phase, how: Collective, read: SlotId, written: SlotId) -> None:
    """Add one phase of a collective: it reads one value and writes one."""
    placement = flow.placements[chunk.name]
    node = Collect(
        chunk=chunk.name,
        phase=phase,
        part=(),
        devices=placement.devices,
        axis=placement.mesh.axis(how.axis),
        how=how,
        reads=(read,),
        writes=(written,),
        stream=next(axis.stream for axis in placement.policy.axes if axis.axis == how.axis),
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase=phase))
