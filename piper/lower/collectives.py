"""Collectives inside divided regions: nodes between the pieces of a region, on groups of its devices."""

import math

from piper.ir.chunk import Chunk, Collective, Phase
from piper.ir.ids import SlotId
from piper.ir.node import Collect
from piper.lower.value_table import Flow, Template


def collect(flow: Flow, chunk: Chunk, phase: Phase, how: Collective, read: SlotId, written: SlotId) -> None:
    """Add one phase of a collective: it reads one value and writes one."""
    placement = flow.placements[chunk.name]
    axes = placement.policy.axes
    place = next(i for i, held in enumerate(axes) if held.axis == how.axis)
    node = Collect(
        chunk=chunk.name,
        phase=phase,
        part=(),
        devices=placement.devices,
        stride=math.prod(held.degree for held in axes[:place]),
        how=how,
        reads=(read,),
        writes=(written,),
        stream=axes[place].stream,
    )
    flow.templates.append(Template(node=node, chunk=chunk.name, phase=phase))
