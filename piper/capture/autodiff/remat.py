"""Chooses which values of a forward are saved for the backward, and which the backward recomputes.

The saved values are a minimum cut of the forward, in bytes, between values that must not be recomputed and
those the backward reads. A compiler fuses cheap operations with their readers, so in compiled code these may
always be recomputed, and so may factors of products that a kernel of the backward can write again. A budget
allows more operations, cheapest per freed byte first, until it is met.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, fx

from piper.capture.autodiff.joint import Joint
from piper.capture.autodiff.partition import Partitioner
from piper.capture.cost.aliases import (
    cheap,
    memory_of,
    memory_readers,
    recomputable,
    storages,
    takes_one,
    tensors_in,
)
from piper.capture.cost.estimate import flops_of
from piper.capture.trace.effects import draws
from piper.capture.trace.graph_walks import reached, upstream

INFINITE = 1 << 62  # a capacity, in bytes
_FLOPS_PER_BYTE = 200  # computed while one byte moves; only the ranking of costs depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The values of a forward that are saved. A backward recomputes all others."""

    keep: frozenset[fx.Node]
    budget: float | None
    kept_bytes: int
    all_bytes: int  # saved when nothing is recomputed
    writers: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    # ^ recomputed factors of products, each with the result of the backward that it is written with


class Chooser:
    """Weighs the bytes of the values of one joint graph against the cost of recomputing them."""

    def __init__(self, cutter: Partitioner, *, compiled: bool) -> None:
        """Read a partition without recomputation. compiled: cheap operations are fused with their readers."""
        self.plain, joint = cutter.run(), cutter.joint
        self.backward, self.casts, self.overwritten = cutter.backward, cutter.casts, cutter.overwritten
        self.sizes = joint.sizes
        self.region = self._region()
        candidates = [node for node in self.region if tensors_in(node) and not self._fixed(node)]
        fusible = [node for node in candidates if compiled and cheap(node)]
        # To recompute what the backward needs in memory costs a kernel.
        factors = [node for node in fusible if any(memory_readers(node, self.backward.__contains__))]
        self.writers = _Writers(joint, self.backward).find(factors)
        passing = {node for node in self.region if self._passes(node)}
        self.free = {*fusible} - {*factors} | self.writers.keys() | passing
        self.costly = sorted((node for node in candidates if node not in self.free), key=self._density)

    def run(self, budget: float | None) -> Choice:
        """Choose the saved values. budget: their share of all bytes. None: what free recomputation leaves."""
        everything = self._bytes(self.plain.saved)
        keep = self._cut(0)
        if budget is not None and self.costly and self._bytes(keep) > budget * everything:
            few, many = 1, len(self.costly)  # the fewest that are enough; all of them, where none are
            while few < many:
                middle = (few + many) // 2
                if self._bytes(self._cut(middle)) <= budget * everything:
                    many = middle
                else:
                    few = middle + 1
            keep = self._cut(few)
        return Choice(
            keep=frozenset(keep),
            budget=budget,
            kept_bytes=self._bytes(keep),
            all_bytes=everything,
            writers={value: result for value, result in self.writers.items() if value not in keep},
        )

    def _region(self) -> list[fx.Node]:
        """Return the nodes that the saved values depend on, and buffers that the forward overwrites."""

        def within(node: fx.Node) -> bool:
            given = node.op == "placeholder" and node not in self.overwritten
            return not given and bool(tensors_in(node))  # sizes are read off any tensor

        region = upstream(self.plain.saved, within)
        return [node for node in self.plain.joint.graph.nodes if node in region]

    def _bytes(self, nodes: Iterable[fx.Node]) -> int:
        """Return the bytes that values hold, with each storage counted once."""
        return sum({memory_of(node): self.sizes.storage_bytes(node.meta["val"]) for node in nodes}.values())

    def _passes(self, node: fx.Node) -> bool:
        """Return whether a value is recomputed anyway, or is one result of an operation with several."""
        return recomputable(node) or node in self.casts or takes_one(node)

    def _fixed(self, node: fx.Node) -> bool:
        """Return whether a value must not be recomputed: it is random, or a choice, as where a row goes."""
        # A choice that is recomputed from numbers that differ in their last bit could come out differently.
        # Attention's integer results are no choice: they are the state of a generator that it does not use.
        if self._passes(node):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) or draws(node):
            return True
        whole = any(not t.is_floating_point() and t.dtype is not torch.bool for t in tensors_in(node))
        return whole and not {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded} & {*node.target.tags}

    def _density(self, node: fx.Node) -> float:
        """Return the cost of recomputing a value, per byte that it holds."""
        nbytes = sum(self.sizes.nbytes(tensor) for tensor in tensors_in(node))
        moved = sum(self.sizes.nbytes(tensor) for _, tensor in storages([node, *node.all_input_nodes]))
        return (flops_of(node, self.sizes) + _FLOPS_PER_BYTE * moved) / max(nbytes, 1)

    def _cut(self, allowed: int) -> list[fx.Node]:
        """Return the values to save if the first `allowed` of the costly operations may be recomputed."""
        may = {*self.free, *self.costly[:allowed]}
        network = Network()
        into = {node: network.place() for node in self.region}
        out = {node: network.place() for node in self.region}
        for node in self.region:
            network.join(into[node], out[node], self._weight(node))
            if node not in may:
                network.join(network.source, into[node])
            for source in node.all_input_nodes:
                if source in out:
                    network.join(out[source], into[node])
        for node in self.plain.saved:
            network.join(out[node], network.sink)
        behind = network.behind_cut()
        return [node for node in self.region if out[node] in behind and into[node] not in behind]

    def _weight(self, node: fx.Node) -> int:
        """Return the bytes that saving a value takes. Infinite: it cannot be saved."""
        several = not isinstance(node.meta["val"], Tensor)
        if several or recomputable(node) or node in self.casts:
            return INFINITE
        return max(1, self.sizes.storage_bytes(node.meta["val"]))


class _Writers:
    """Looks for kernels of one joint graph's backward that can write forward values.

    A product needs its factors in memory. A factor that is recomputed, such as the gated product of a
    feed-forward layer or the output of a norm, has to be written a second time. That takes no launch and no
    read of its own if a kernel of the backward reads all that the factor is computed from, and makes a result
    of the same length: the compiler then writes the factor as one more result of that kernel.
    """

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
            and (node in gradients or any(memory_readers(node, backward.__contains__)))
        }
        self.roots = self._roots()
        self.written: dict[fx.Node, list[fx.Node]] = {}  # by result: the values so far

    def find(self, values: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the values that cost only one more write, each with the result it is written with."""
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
        """Return the memory that a kernel reads to compute each value, with the lengths there."""
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
        backward = self.backward.__contains__

        def then(node: fx.Node) -> Iterable[fx.Node]:
            later = self.written.get(node, ())
            return (*node.users, *(reader for other in later for reader in memory_readers(other, backward)))

        return reached(memory_readers(value, backward), then)


class Network:
    """A directed network of numbered places, with a capacity on each edge."""

    def __init__(self) -> None:
        self.left: list[dict[int, int]] = []  # of each place: what each edge from it can take, both ways
        self.source, self.sink = self.place(), self.place()

    def place(self) -> int:
        """Add a place."""
        self.left.append({})
        return len(self.left) - 1

    def join(self, start: int, end: int, capacity: int = INFINITE) -> None:
        """Add an edge."""
        self.left[start][end] = self.left[start].get(end, 0) + capacity
        self.left[end].setdefault(start, 0)

    def behind_cut(self) -> set[int]:
        """Return the places behind the minimum cut, of several the one nearest to the sink."""
        while (levels := self._levels())[self.sink] >= 0:
            self._fill(levels)
        return reached([self.sink], lambda here: (at for at in self.left[here] if self.left[at][here]))

    def _levels(self) -> list[int]:
        """Return each place's distance from the source along edges with capacity left. -1: unreachable."""
        levels = [-1] * len(self.left)
        levels[self.source] = 0
        queue = [self.source]
        for here in queue:  # the loop appends to it
            for there, left in self.left[here].items():
                if left and levels[there] < 0:
                    levels[there] = levels[here] + 1
                    queue.append(there)
        return levels

    def _fill(self, levels: list[int]) -> None:
        """Send as much as fits along the shortest ways."""
        ahead = [[to for to in self.left[at] if levels[to] == level + 1] for at, level in enumerate(levels)]
        path = [self.source]
        while path:
            here = path[-1]
            if here == self.sink:
                least = min(self.left[a][b] for a, b in pairwise(path))
                for a, b in pairwise(path):
                    self.left[a][b] -= least
                    self.left[b][a] += least
                full = next(i for i, (a, b) in enumerate(pairwise(path), start=1) if not self.left[a][b])
                del path[full:]
            elif ahead[here] and self.left[here][ahead[here][-1]]:
                path.append(ahead[here][-1])
            elif ahead[here]:
                ahead[here].pop()
            else:
                path.pop()
                if path:
                    ahead[path[-1]].pop()
