"""Finds the regions of a captured model that its strategy shards along an axis."""

from collections.abc import Sequence

from piper.capture.shard.request import Request
from piper.directives import Directive, ShardAxis
from piper.ir.chunk import Tags
from piper.ir.graph import Graph
from piper.ir.mesh import Axis, Mesh, mesh_of


def requests_of(graph: Graph, strategy: Sequence[Directive]) -> list[Request]:
    """Return what each `shard` over an axis asks, for the regions where no later directive took its place."""
    sizes = {node.chunk: len(node.devices) for node in graph.nodes.values()}
    regions: dict[int, dict[Tags, Mesh]] = {}
    for chunk in graph.outline.chunks:
        axes = graph.policy(chunk.name).axes
        mesh = mesh_of(
            tuple(range(sizes[chunk.name])), (Axis(name=held.axis, degree=held.degree) for held in axes)
        )
        for held in axes:
            regions.setdefault(held.origin, {})[chunk.tags] = mesh
    requests = []
    for number, directive in enumerate(strategy):
        if isinstance(directive, ShardAxis) and number in regions:
            degree = directive.ways if directive.ways is not None else len(directive.devices)
            requests.append(
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
    return requests
