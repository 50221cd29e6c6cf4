"""A rough cost of each node, used only to choose between orders. The simulator has accurate costs."""

from collections.abc import Mapping

from piper.ir.chunk import Chunk
from piper.ir.ids import SlotId
from piper.ir.node import Collect, Compute, Exchange, Node, Transfer
from piper.plan.plan import Slot

FLOPS = 2e14  # a current accelerator's, about
MEMORY = 2e12  # bytes per second
LINK = 5e10
LATENCY = 5e-6


def cost_of(node: Node, chunks: Mapping[str, Chunk], values: Mapping[SlotId, Slot]) -> float:
    """Estimate the seconds that a node takes."""
    if isinstance(node, Compute):
        spec = chunks[node.chunk].phases[node.phase]
        return LATENCY + max(spec.flops / FLOPS, spec.bytes_moved / MEMORY)
    if isinstance(node, Transfer | Exchange | Collect):
        return LATENCY + values[node.writes[0].base].nbytes / LINK
    return LATENCY
