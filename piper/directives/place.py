"""`place`: which devices run which nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives.base import (
    Directive,
    checked_devices,
    given_devices,
    given_filter,
    given_stream,
    registered,
    selected,
    touched,
)
from piper.ir.graph import Graph
from piper.ir.select import At


@registered(0)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Place(Directive):
    """Run the selected nodes on `devices`.

    F[PP=0]
    -->
    F[PP=0] @0,2      (a data edge to a node elsewhere will become a transfer on `stream`)
    """

    at: At
    devices: tuple[int, ...]
    stream: str | None = None

    def apply(self, graph: Graph, number: int) -> Graph:
        by = self.title(number)
        devices = checked_devices(self.devices, by)
        nodes = selected(graph, self.at, by)
        if self.stream:
            graph = graph.with_options(
                {node.chunk for node in nodes},
                lambda _, options: replace(options, transfer_stream=self.stream),
            )
        return graph.update(replace(node, devices=devices, origin=touched(node, number)) for node in nodes)


def place(at: At, devices: Sequence[int] | int, stream: str | None = None) -> Place:
    """Run the selected nodes on `devices`, each on its slice of the samples; their transfers use `stream`."""
    return Place(
        at=given_filter("place", at),
        devices=given_devices("place", [devices] if isinstance(devices, int) else devices),
        stream=given_stream("place", "stream", stream),
    )
