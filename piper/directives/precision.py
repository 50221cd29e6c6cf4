"""`precision`: run the products of regions in a narrower type than the job's."""

from dataclasses import dataclass, replace

from piper.directives.arguments import argument, one_of
from piper.directives.base import ChunkDirective, given_filter, registered
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.mesh import copies_along
from piper.ir.node import Compute
from piper.ir.select import At

FP8 = "fp8"


@registered(6)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Precision(ChunkDirective):
    """Run the products of the selected regions' linear layers in fp8, forward and backward.

    F[PP=0]: x @ w.T in bf16
    -->
    F[PP=0]: x and w rounded to 8 bits, x @ w.T summed and returned as before
    """

    products: str = argument(one_of(FP8), hint="Job(precision=...) is the precision of everything else")
    gather: str | None = argument(  # under zero=3 their weights are gathered in it
        one_of(FP8), default=None, hint="leave it out to gather weights in the job's precision"
    )

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        by = self.title(number)
        chunks = graph.chunks
        chosen = [name for name in dict.fromkeys(node.chunk for node in nodes) if chunks[name].products]
        if not chosen:
            raise ScheduleError(
                "nothing here multiplies by the weight of a linear layer",
                by=by,
                facts={"asked": str(self.at), "left out": "attention, routers, grouped experts, the head"},
                hint="select the regions of linear layers",
            )
        self._check_copies(graph, chosen, by)
        return graph.with_options(
            chosen, lambda _, options: replace(options, products=self.products, gather=self.gather)
        )

    def _check_copies(self, graph: Graph, chosen: list[str], by: str) -> None:
        """Refuse weights of heads that several devices hold: each would round a term of their gradient."""
        weights = {name for chunk in chosen for name in graph.chunks[chunk].products}
        for param in graph.outline.parameters:
            axes = [held.axis for held in param.placements]
            copied = [axis for axis in axes if copies_along(axis) in axes]
            if param.name in weights and copied:
                raise ScheduleError(
                    f"{param.name} has fewer heads than {copied[0]} has devices, which would each round a "
                    "term of its gradient",
                    by=by,
                    facts={"asked": str(self.at)},
                    hint="choose `ways` of that axis up to the number of heads, or leave precision out",
                )


def precision(at: At, products: str, gather: str | None = None) -> Precision:
    """Run the products of the selected regions' linear layers in `products`, which is "fp8".

    Attention, routers, grouped experts and the head stay in the job's precision, and so do parameters,
    their gradients' sums and the optimizer.
    gather: "fp8" lets the weights of these products travel in fp8 where zero=3 gathers them.
    """
    return Precision(at=given_filter("precision", at), products=products, gather=gather)
