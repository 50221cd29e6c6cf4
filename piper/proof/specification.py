"""The specification that plans are proven against: the captured model and what the directives made of it.

It is read from the graph alone. Nothing here, and nothing in this package, may import the lowering.
"""

import math
from collections.abc import Mapping
from itertools import product

from piper.devices import Devices, Sharding
from piper.ir.chunk import Chunk, Output, Source, Tags
from piper.ir.graph import Graph


class Specification:
    """What a step must compute: placements, microbatches, data flow, losses and gradients."""

    def __init__(self, graph: Graph, *, clip: bool) -> None:
        self.graph, self.clip = graph, clip
        self.outline = graph.outline
        self.chunks: Mapping[str, Chunk] = graph.chunks
        self.placement: dict[str, Devices] = {node.chunk: node.devices for node in graph.nodes.values()}
        self.devices = tuple(sorted({device for devices in self.placement.values() for device in devices}))
        self.microbatches = {name: microbatches_of(axes) for name, axes in graph.parts.items()}
        self.known_microbatches = {name: frozenset(found) for name, found in self.microbatches.items()}
        self.axes = dict(axis for axes in graph.parts.values() for axis in axes)
        self.cells = math.lcm(*{len(devices) for devices in self.placement.values()})
        loss = self.outline.loss.chunk
        self.slices = len(self.placement[loss]) * len(self.microbatches[loss])
        self.mutated = frozenset(name for chunk in self.outline.chunks for name in chunk.mutated)
        self.contributors = self._contributors()
        self.readers = self._readers()

    @property
    def seed(self) -> float:
        """The gradient that the backward of each slice starts from."""
        return 1.0 if self.outline.weight is not None else 1.0 / self.slices

    def degree(self, chunk: str) -> int:
        """Return over how many devices the experts of a chunk are divided; 1 for a chunk without experts."""
        return 1 if self.chunks[chunk].kind == "compute" else self.graph.policy(chunk).ways

    def moves_nothing(self, chunk: str) -> bool:
        """Return whether a chunk is a route or an unroute between devices that hold all experts."""
        return self.chunks[chunk].kind in ("route", "unroute") and self.degree(chunk) == 1

    def resolve(self, source: Source) -> Source:
        """Return the source of a value, seen through a route or an unroute that moves nothing."""
        while isinstance(source, Output) and self.moves_nothing(source.chunk):
            source = self.chunks[source.chunk].inputs[source.index]
        return source

    def routed(self, chunk: str) -> bool:
        """Return whether the outputs of a chunk are rows that lie with divided experts."""
        return self.chunks[chunk].kind in ("route", "expert") and self.degree(chunk) > 1

    def sharding(self, chunk: str, name: str) -> Sharding:
        """Return how the directives divide a parameter or a buffer of a chunk over its devices."""
        return self.graph.policy(chunk).sharding(name)

    def is_alike(self, chunk: str, position: int) -> bool:
        """Return whether an input is the same for all samples.

        It is where its producer sees slices of another size and yet gives the same shape.
        """
        source = self.resolve(self.chunks[chunk].inputs[position])
        if not isinstance(source, Output):
            return False
        if len(self.placement[source.chunk]) == len(self.placement[chunk]):
            return False
        given = self.chunks[source.chunk].outputs[source.index].shape
        return given == self.chunks[chunk].input_specs[position].shape != ()

    def is_loss(self, chunk: str, index: int) -> bool:
        """Return whether an output is the loss."""
        return (chunk, index) == (self.outline.loss.chunk, self.outline.loss.index)

    def is_trained(self, param: str) -> bool:
        """Return whether some backward gives a parameter a gradient."""
        return param in self.contributors

    def in_order(self, chunk: str) -> bool:
        """Return whether the forwards of a chunk must run in the order of their microbatches.

        That is so without any `order` directive, and where one puts all of them in that order.
        """
        wanted = list(self.microbatches[chunk])
        for ordering in self.graph.orderings:
            groups = [
                [step.part for step in group if (step.chunk, step.phase) == (chunk, "F")]
                for group in ordering.groups
            ]
            if [found for found in groups if found] == [[microbatch] for microbatch in wanted]:
                return True
        return not self.graph.orderings

    def _contributors(self) -> dict[str, list[str]]:
        """Find the chunks whose backward gives each trainable parameter a gradient."""
        trainable = {param.name for param in self.outline.parameters if param.trainable}
        found: dict[str, list[str]] = {}
        for chunk in self.outline.chunks:
            if "B" in chunk.phases:
                for name in chunk.phases["B"].grad_params:
                    if name in trainable:
                        found.setdefault(name, []).append(chunk.name)
        return found

    def _readers(self) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """Find the inputs through which each output gets its gradient."""
        found: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for chunk in self.outline.chunks:
            if "B" not in chunk.phases or self.moves_nothing(chunk.name):
                continue
            for position in chunk.phases["B"].grad_inputs:
                source = self.resolve(chunk.inputs[position])
                if isinstance(source, Output):
                    found.setdefault((source.chunk, source.index), []).append((chunk.name, position))
        return found


def microbatches_of(axes: Tags) -> tuple[Tags, ...]:
    """Return every microbatch of some axes, in order: (("MB", 2),) gives MB=0 and MB=1."""
    ranges = [[(axis, index) for index in range(size)] for axis, size in axes]
    return tuple(product(*ranges))
