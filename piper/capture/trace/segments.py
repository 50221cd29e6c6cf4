"""Cuts a long chunk into segments that repeat, so that a stage of many equal layers is traced as one layer.

A segment ends where only one value that needs a gradient goes on, as between the layers of a decoder.
Gradients then meet in the same order as in the whole chunk, so the parts give the same numbers as the whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor, fx

from piper.capture.trace.functionalize import memory_of, value, written_memory

LEAST = 24  # nodes of a segment: shorter ones cost more to begin than they save


def split_nodes(
    nodes: Sequence[fx.Node], state: Collection[fx.Node], bundles: Mapping[fx.Node, int]
) -> list[list[fx.Node]]:
    """Cut nodes, in the order of the program, into segments. state: those of parameters and buffers."""
    ends = _ends(nodes, state, bundles)
    segments: list[list[fx.Node]] = [[]]
    for position, node in enumerate(nodes):
        if position in ends and len(segments[-1]) >= LEAST and len(nodes) - position >= LEAST:
            segments.append([])
        segments[-1].append(node)
    return segments


def _ends(nodes: Sequence[fx.Node], state: Collection[fx.Node], bundles: Mapping[fx.Node, int]) -> set[int]:
    """Return the positions before which a segment may end."""
    first = {node: position for position, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        for source in node.all_input_nodes:
            first.setdefault(
                source, position if source in state else -1
            )  # inputs are there from the beginning
            last[source] = position
    written = written_memory(nodes)
    trained = _IntervalCount(len(nodes))  # values that need a gradient and go on past a position
    blocked = _IntervalCount(len(nodes))  # reasons not to end before it
    for node, end in last.items():
        made = value(node)
        if not isinstance(made, Tensor) or not _plain(made) or memory_of(node) in written:
            blocked.add(first[node] + 1, end)
        elif node not in state and made.requires_grad:
            trained.add(first[node] + 1, end)
    for position, (before, node) in enumerate(pairwise(nodes), start=1):
        if node in bundles and bundles[node] == bundles.get(before):
            blocked.add(position, position)
    return {
        position
        for position, (values, reasons) in enumerate(zip(trained.sums(), blocked.sums(), strict=True))
        if values <= 1 and not reasons
    }


class _IntervalCount:
    """Counts intervals over positions."""

    def __init__(self, length: int) -> None:
        self.change = [0] * (length + 1)

    def add(self, begin: int, end: int) -> None:
        if begin <= end:
            self.change[begin] += 1
            self.change[end + 1] -= 1

    def sums(self) -> Iterator[int]:
        return accumulate(self.change)


def _plain(made: Tensor) -> bool:
    """Return whether a value can pass between segments as it is: contiguous, and of known size."""
    return all(isinstance(size, int) for size in made.shape) and made.is_contiguous()
