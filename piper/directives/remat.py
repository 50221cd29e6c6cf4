"""`remat`: save fewer activations and recompute the others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives.base import FRACTION, ChunkDirective, argument, given_tag, registered
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.ids import show_part
from piper.ir.node import Compute
from piper.ir.select import At


@registered(5)
@dataclass(frozen=True, slots=True, repr=False)
class Remat(ChunkDirective):
    """Save at most `budget` (0 to 1) of the bytes that the selected chunks save for their backward.

    Their backwards recompute the rest.

    F[PP=0] --480 MB--> B[PP=0]
    -->
    F[PP=0] --120 MB--> B[PP=0] with some of F      (budget=0.25)

    across: a tag. Regions with it save only their inputs between forward and backward. Their forwards are
    recomputed before their backwards, which read what the second run saved; the budget says how much that is.
    """

    budget: float = argument(
        FRACTION, hint="1 keeps all that is saved, 0.5 at most half of its bytes, 0 makes all of it again"
    )
    across: str | None = argument(default=None, given=given_tag)

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        names = saving_chunks(graph, nodes, self.at)
        regions = self._regions(graph, names)
        return graph.with_options(
            names,
            lambda name, options: replace(options, budget=float(self.budget), rerun=regions.get(name)),
        )

    def _regions(self, graph: Graph, names: list[str]) -> dict[str, str]:
        """Return, for each chunk, the region around it that is recomputed, by the tags down to `across`."""
        if self.across is None:
            return {}
        regions: dict[str, str] = {}
        chunks = graph.chunks
        for name in names:
            tags = chunks[name].tags
            place = next((i for i, (tag, _) in enumerate(tags) if tag == self.across), None)
            if place is None:
                around = ", ".join(
                    dict.fromkeys(tag for chunk in graph.outline.chunks for tag, _ in chunk.tags)
                )
                raise ScheduleError(
                    f"{name} lies in no region {self.across!r}",
                    facts={"asked": f"across={self.across!r}", "regions": around or "none"},
                    hint="name a tag that the model is annotated with around all of them, or select fewer",
                )
            regions[name] = show_part(tags[: place + 1])[1:]
        return regions


def saving_chunks(graph: Graph, nodes: Sequence[Compute], at: At) -> list[str]:
    """Return the chunks of the selected nodes that save activations; refuse a selection without any."""
    chunks = graph.chunks
    names = [name for name in dict.fromkeys(node.chunk for node in nodes) if chunks[name].has_code]
    if not names:
        raise ScheduleError(
            "nothing here saves activations",
            facts={"asked": str(at), "but": f"{nodes[0].chunk} only sends rows"},
            hint="select the regions around it, or its experts",
        )
    return names


remat = Remat
