"""The sums of a step: the numbers that devices add up at its end, so that each of them knows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from piper.ir.chunk import Output
from piper.ir.graph import Graph
from piper.ir.ids import OF_STEP, SlotId, SlotKind

USUAL: Final[Mapping[str, int]] = {"squares": 1, "loss": 1, "weight": 1}  # the lengths of the usual ones
OWN: Final = (*USUAL, "metrics", "overflows")  # all but the metrics that directives add


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSum:
    """A sum of a step: one number, or several, in float64.

    All sums of a step travel in one tensor, the slot `total`. Each device adds to a sum what it has in slots
    of the sum (`SlotId.sum_name`); `norm` computes the squares of its gradients.
    """

    name: str
    length: int = 1
    source: Output | None = None  # a chunk's result that one slot adds up over microbatches. None: no such
    steers: bool = False  # updates depend on it, so they wait for the total

    @property
    def slot(self) -> SlotId:
        """Return the slot in which a device adds up the results of its microbatches."""
        assert self.name in OF_STEP, "only what a chunk returns has a slot that all its microbatches share"
        return SlotId(cast(SlotKind, self.name))


def step_sums(graph: Graph, *, clip: bool) -> tuple[StepSum, ...]:
    """Return the sums of a step, as they follow each other in the total. clip: gradients are clipped."""
    outline = graph.outline
    blocks = any(graph.policy(chunk.name).may_overflow for chunk in outline.chunks)
    declared = (
        StepSum(name="squares", steers=clip),  # of the gradient's elements
        StepSum(name="loss", source=outline.loss),
        StepSum(name="weight", source=outline.weight, steers=outline.weight is not None),
        StepSum(name="metrics", source=outline.metrics, length=2 * len(outline.metric_names)),
        StepSum(name="overflows", length=int(blocks), steers=True),  # how often rows exceed their blocks
        *(StepSum(name=name, length=2) for name in graph.metrics),  # a sum and its weight
    )
    return tuple(each for each in declared if each.length)
