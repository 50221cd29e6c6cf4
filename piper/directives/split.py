"""`split`: the same work on microbatches of the samples."""

from dataclasses import dataclass, replace

from piper.directives.base import Directive, argument, check_whole, registered, selected, touched, whole
from piper.errors import ScheduleError
from piper.ir.graph import Graph, Index
from piper.ir.node import Compute
from piper.ir.select import At


@registered(3)
@dataclass(frozen=True, slots=True, repr=False)
class Split(Directive):
    """Copy the selected sub-graph once per microbatch, tagged `axis=0`, `axis=1`, ...

    Each device's samples are divided into `parts` microbatches.

    F[PP=0] --> F[PP=1]
    -->
    F[PP=0 MB=0] --> F[PP=1 MB=0]
    F[PP=0 MB=1] --> F[PP=1 MB=1]
    """

    at: At
    axis: str = argument(default="MB", key="dim_name")
    parts: int = argument(
        whole(1), default=1, hint="it is the number of microbatches", key="num_microbatches", needed=True
    )

    def apply(self, graph: Graph, number: int) -> Graph:
        nodes = selected(graph, self.at)
        taken = {*graph.index.indices, "PASS"}
        if not isinstance(self.axis, str) or not self.axis.isidentifier() or self.axis in taken:
            raise ScheduleError(
                f"{self.axis!r} cannot name the parts",
                facts={"taken": ", ".join(sorted(taken))},
                hint="choose a word that no annotation and no earlier split uses",
            )
        self._check_whole(graph, nodes)
        copies: dict[str, tuple[Compute, ...]] = {}
        for node in nodes:
            parts = [(*node.part, (self.axis, i)) for i in range(self.parts)]
            origin = touched(node, number)
            copies[node.name] = tuple(replace(node, part=part, origin=origin) for part in parts)
        chunks = {node.chunk for node in nodes}
        axes = {**graph.parts, **{c: (*graph.parts[c], (self.axis, self.parts)) for c in chunks}}
        return replace(graph.splice(copies), index=Index(graph.outline, axes), parts=axes)

    def _check_whole(self, graph: Graph, nodes: list[Compute]) -> None:
        """Refuse a filter that mixes split and unsplit values: their samples would not line up."""
        check_whole(graph, nodes)
        chunks = {node.chunk for node in nodes}
        for chunk in graph.outline.chunks:
            for source in chunk.sources:
                if (chunk.name in chunks) != (source.chunk in chunks):
                    raise ScheduleError(
                        "a split part would meet an unsplit value",
                        facts={
                            "split": chunk.name if chunk.name in chunks else source.chunk,
                            "unsplit": source.chunk if chunk.name in chunks else chunk.name,
                        },
                        hint="split everything that is connected: split(at(), ...)",
                    )


split = Split
