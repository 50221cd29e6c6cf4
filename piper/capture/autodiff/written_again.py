"""Finds values of a forward that a compiled backward writes again in a kernel that it runs anyway.

A product needs its factors in memory. A factor that is recomputed, such as the gated product of a
feed-forward layer or the output of a norm, has to be written a second time. That takes no launch and no read
of its own if a kernel of the backward reads all that the factor is computed from, and makes a result of the
same length: the compiler then writes the factor as one more result of that kernel.
"""

import math
from collections.abc import Iterable

from torch import fx

from piper.capture.autodiff.joint import Joint
from piper.capture.cost.aliases import (
    cheap,
    memory_of,
    memory_readers,
    read_from_memory,
    recomputable,
    tensors_in,
)


def writers(joint: Joint, backward: set[fx.Node], values: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return, for each value that costs only one more write to recompute, the result it is written with.

    values: forward values that a compiler can fuse, and that the backward reads from memory.
    """
    return _Finder(joint, backward).run(values)


class _Finder:
    """Looks for kernels of one joint graph's backward that can write forward values."""

    def __init__(self, joint: Joint, backward: set[fx.Node]) -> None:
        self.graph, self.backward = joint.graph, backward
        self.length = {
            node: math.prod(joint.sizes.shape(tensors_in(node)[0]))
            for node in joint.graph.nodes
            if len(tensors_in(node)) == 1
        }
        gradients = {*joint.grad_inputs.values(), *joint.grad_params.values()}
        self.results = {
            node: None
            for node in joint.graph.nodes
            if node in backward
            and cheap(node)
            and (node in gradients or read_from_memory(node, backward.__contains__))
        }
        self.roots = self._roots()
        self.written: dict[fx.Node, list[fx.Node]] = {}  # by result: the values found so far

    def run(self, values: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        writers: dict[fx.Node, fx.Node] = {}
        for value in values:
            wanted = {root for root, length in self.roots[value].items() if length >= self.length[value]}
            fitting = [
                result
                for result in self.results
                if self.length[result] == self.length[value] and self.roots[result].keys() >= wanted
            ]
            # The last of them is that of the value's own layer: others only see it through later layers.
            if wanted and fitting and fitting[-1] not in self._behind(value):
                writers[value] = fitting[-1]
                self.written.setdefault(fitting[-1], []).append(value)
        return writers

    def _roots(self) -> dict[fx.Node, dict[int, int]]:
        """Return the memory that a kernel reads to compute each value, with the lengths found there."""
        roots: dict[fx.Node, dict[int, int]] = {}
        for node in self.graph.nodes:
            roots[node] = {}
            if cheap(node) or (node.all_input_nodes and recomputable(node)):
                for source in node.all_input_nodes:
                    stored = source in self.results
                    roots[node] |= {memory_of(source): self.length[source]} if stored else roots[source]
            elif node in self.length:
                roots[node] = {memory_of(node): self.length[node]}
        return roots

    def _behind(self, value: fx.Node) -> set[fx.Node]:
        """Return what can only run once a value is in memory, given where earlier values are written."""
        stack = list(memory_readers(value, self.backward.__contains__))
        reached: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += node.users
                for later in self.written.get(node, ()):
                    stack += memory_readers(later, self.backward.__contains__)
        return reached
