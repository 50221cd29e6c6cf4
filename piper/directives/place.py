"""`place`: which devices run which nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives.base import PlacingDirective, registered
from piper.ir.graph import Graph
from piper.ir.node import Compute
from piper.ir.select import At


@registered(0)
@dataclass(frozen=True, slots=True, repr=False)
class Place(PlacingDirective):
    """Run the selected nodes on `devices`.

    F[PP=0]
    -->
    F[PP=0] @0,2      (a data edge to a node elsewhere will become a transfer on `stream`)
    """

    stream: str | None = None

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        if not self.stream:
            return graph
        return graph.with_options(
            {node.chunk for node in nodes},
            lambda _, options: replace(options, transfer_stream=self.stream),
        )


def place(at: At, devices: Sequence[int] | int, stream: str | None = None) -> Place:
    """Run the selected nodes on `devices`, each on its slice of the samples; their transfers use `stream`."""
    return Place(at, [devices] if isinstance(devices, int) else devices, stream)
