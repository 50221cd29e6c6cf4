"""Cuts long chunks into segments, of which equal ones are traced once.

A long chunk is cut into segments that repeat, so that a stage of many equal layers is traced as one layer.
A segment ends where only one value that needs a gradient goes on, as between the layers of a decoder.
Gradients then meet in the same order as in the whole chunk, so the parts give the same numbers as the whole.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import Tensor, fx

from piper.capture.trace.functionalize import memory_of, value, written_memory
from piper.capture.trace.graph_walks import interval_sums, repeated_runs

LEAST = 24  # nodes of a segment: shorter ones cost more to begin than they save
LONGEST = 64  # places at which a layer could be cut: one with more is not looked for
Labels = tuple[int, ...]  # equal numbers for equal parts, between places at which a chunk can be cut


def split_chunks(
    chunks: Sequence[Sequence[fx.Node]], state: Collection[fx.Node], bundles: Mapping[fx.Node, int]
) -> list[list[Sequence[fx.Node]]]:
    """Cut the nodes of chunks, in the order of the program, into segments. state: parameters and buffers."""
    numbers: dict[Hashable, int] = {}
    parts: list[tuple[Sequence[fx.Node], list[int], Labels]] = []
    for nodes in chunks:
        bounds = [*dict.fromkeys((0, *sorted(_ends(nodes, state, bundles)), len(nodes)))]
        alike = (tuple(map(_likeness, nodes[begin:end])) for begin, end in pairwise(bounds))
        parts.append((nodes, bounds, tuple(numbers.setdefault(each, len(numbers)) for each in alike)))
    wholes = sorted({labels for *_, labels in parts}, key=len, reverse=True)
    return [
        [nodes[begin:end] for begin, end in pairwise((*_starts(bounds, labels, wholes), len(nodes)))]
        for nodes, bounds, labels in parts
    ]


def _starts(bounds: Sequence[int], labels: Labels, wholes: Sequence[Labels]) -> list[int]:
    """Return where segments begin. bounds: where one may begin or end. wholes: the labels of all chunks."""

    def inside(first: int, last: int) -> list[int]:
        return _starts(bounds[first : last + 1], labels[first:last], wholes) if first < last else []

    # What is equal to another chunk, such as the layer in the first stage of a pipeline, is cut as that one
    # is. Layers that repeat are a segment each, so that none is traced together with what is before and
    # behind all of them. There, and where nothing repeats, segments are as short as is worth it.
    for start, stop in _equal_to_others(bounds, labels, wholes):
        return [*inside(0, start), *inside(start, stop), *inside(stop, len(labels))]
    layers = _layers(bounds, labels)
    if not layers:
        return _long(bounds)
    return [*inside(0, layers.start), *(bounds[at] for at in layers), *inside(layers.stop, len(labels))]


def _equal_to_others(
    bounds: Sequence[int], labels: Labels, wholes: Sequence[Labels]
) -> Iterator[tuple[int, int]]:
    """Yield the parts that are equal to a whole chunk of enough nodes, those of the longest chunk first."""
    for whole in wholes:
        for start in range(len(labels) - len(whole) + 1) if len(whole) < len(labels) else ():
            stop = start + len(whole)
            if labels[start:stop] == whole and bounds[stop] - bounds[start] >= LEAST:
                yield start, stop


def _layers(bounds: Sequence[int], labels: Labels) -> range:
    """Return the parts with which layers begin, of the run of equal layers that saves the most traces."""
    saved, layers = 0, range(0)  # nodes that need not be traced
    for run in repeated_runs(labels, range(1, min(LONGEST, len(labels) // 2) + 1)):
        size, times = bounds[run[1]] - bounds[run.start], (run.stop - run.start) // run.step
        if size >= LEAST and (times - 1) * size > saved:
            saved = (times - 1) * size
            layers = run[:times]
    return layers


def _long(bounds: Sequence[int]) -> list[int]:
    """Return where segments begin that all have as many nodes as are worth one."""
    starts = [bounds[0]]
    for position in bounds[1:]:
        if position - starts[-1] >= LEAST and bounds[-1] - position >= LEAST:
            starts.append(position)
    return starts


def _likeness(node: fx.Node) -> Hashable:
    """Return the properties that nodes of equal layers share. Whether bodies are equal is found out later."""
    result = value(node)
    if not isinstance(result, Tensor):
        return node.op, node.target
    return node.op, node.target, result.dtype, tuple(n if isinstance(n, int) else None for n in result.shape)


def _ends(nodes: Sequence[fx.Node], state: Collection[fx.Node], bundles: Mapping[fx.Node, int]) -> set[int]:
    """Return the positions before which a segment may end."""
    first = {node: position for position, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        for source in node.all_input_nodes:
            first.setdefault(source, position if source in state else -1)  # inputs: from the beginning
            last[source] = position
    written = written_memory(nodes)
    trained: list[tuple[int, int, int]] = []  # values that need a gradient and go on past positions
    blocked: list[tuple[int, int, int]] = []  # reasons not to end before a position
    for node, end in last.items():
        result = value(node)
        if not isinstance(result, Tensor) or not _plain(result) or memory_of(node) in written:
            blocked.append((first[node] + 1, end, 1))
        elif node not in state and result.requires_grad:
            trained.append((first[node] + 1, end, 1))
    for position, (before, node) in enumerate(pairwise(nodes), start=1):
        if node in bundles and bundles[node] == bundles.get(before):
            blocked.append((position, position, 1))
    sums = zip(interval_sums(len(nodes), trained), interval_sums(len(nodes), blocked), strict=True)
    return {position for position, (values, reasons) in enumerate(sums) if values <= 1 and not reasons}


def _plain(value: Tensor) -> bool:
    """Return whether a value can pass between segments as it is: contiguous, and of known size."""
    known = all(isinstance(number, int) for number in (*value.shape, *value.stride()))
    return known and value.is_contiguous()
