"""Finds the regions of a captured model that its strategy divides along an axis."""

from collections.abc import Sequence

from piper.capture.divide.request import DeviceGrid, Request
from piper.directives import Directive, ShardAxis
from piper.ir.chunk import Tags
from piper.ir.graph import Graph


def requests_of(graph: Graph, strategy: Sequence[Directive]) -> list[Request]:
    """Return what each `shard` over an axis asks, for the regions where no later directive took its place."""
    sizes = {node.chunk: len(node.devices) for node in graph.nodes.values()}
    regions: dict[int, dict[Tags, DeviceGrid]] = {}
    for chunk in graph.outline.chunks:
        for held in graph.policy(chunk.name).axes:
            axes = tuple((each.axis, each.degree) for each in graph.policy(chunk.name).axes)
            grid = DeviceGrid(devices=sizes[chunk.name], axes=axes)
            regions.setdefault(held.origin, {})[chunk.tags] = grid
    found = []
    for number, directive in enumerate(strategy):
        if isinstance(directive, ShardAxis) and number in regions:
            degree = directive.ways if directive.ways is not None else len(directive.devices)
            found.append(
                Request(
                    by=directive.title(number),
                    axis=directive.axis,
                    degree=degree,
                    weights=dict(directive.weights),
                    batch=dict(directive.batch),
                    between=directive.between,
                    attention=directive.attention,
                    zigzag=directive.balance == "zigzag",
                    regions=regions[number],
                )
            )
    return found
