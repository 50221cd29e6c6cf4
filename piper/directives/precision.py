"""`precision`: run the products of regions in a narrower type than the job's."""

from dataclasses import dataclass, replace

from piper.directives.base import ChunkDirective, argument, one_of, registered
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.node import Compute

FP8 = "fp8"


@registered(6)
@dataclass(frozen=True, slots=True, repr=False)
class Precision(ChunkDirective):
    """Run the products of the selected regions' linear layers in `products`, which is "fp8".

    Attention, routers and the head stay in the job's precision, and so do parameters, their gradients' sums,
    the optimizer, and the gradients of the weights of experts.
    gather: "fp8" lets the weights of these products travel in fp8 where zero=3 gathers them.

    F[PP=0]: x @ w.T in bf16
    -->
    F[PP=0]: x and w rounded to 8 bits, x @ w.T summed and returned as before
    """

    products: str = argument(one_of(FP8), hint="Job(precision=...) is the precision of everything else")
    gather: str | None = argument(
        one_of(FP8), default=None, hint="leave it out to gather weights in the job's precision"
    )

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        chunks = graph.chunks
        chosen = [name for name in dict.fromkeys(node.chunk for node in nodes) if chunks[name].products]
        if not chosen:
            raise ScheduleError(
                "nothing here multiplies by the weight of a linear layer",
                facts={"asked": str(self.at), "left out": "attention, routers, the head"},
                hint="select the regions of linear layers",
            )
        return graph.with_options(
            chosen, lambda _, options: replace(options, products=self.products, gather=self.gather)
        )


precision = Precision
