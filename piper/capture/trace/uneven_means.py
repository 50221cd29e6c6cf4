"""Finds means in a captured loss whose divisor depends on the data: slices of a batch may weigh unevenly.

A mean over an axis of fixed size divides every slice of a batch by the same number. These do not: a mean
cross entropy over several labels per sample, because labels can be ignored; one with a weight for each class;
a mean over rows that a mask selects; a sum divided by a count of the batch.
"""

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from piper.capture.trace.effects import argument, name_of
from piper.capture.trace.functionalize import value
from piper.capture.trace.recording import Recording, live
from piper.capture.trace.upstream import upstream
from piper.capture.trace_errors import node_line
from piper.ir.chunk import Batch

_ENTROPIES = ("cross_entropy", "nll_loss", "cross_entropy_loss")
_DIVISIONS = (operator.truediv, torch.div, torch.true_divide)


def uneven_means(recording: Recording, rows: int) -> tuple[str, ...]:
    """Return each mean of a loss whose slices may count unevenly, with its line. rows: the samples traced."""
    if recording.weighted:
        return ()  # a sum with its weight
    needed = live(recording.graph, recording.results[:1])
    means = (
        text for node in recording.graph.nodes if node in needed for text in _uneven(recording, node, rows)
    )
    return tuple(dict.fromkeys(means))


def _uneven(recording: Recording, node: fx.Node, rows: int) -> Iterator[str]:
    result = value(node)
    if not isinstance(result, Tensor) or result.dim() or not result.requires_grad:
        return
    name = name_of(node)
    if name in _ENTROPIES and argument(node, "reduction", "mean") == "mean":
        labels = value(node.all_input_nodes[1])
        several = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.numel() > rows
        if several or isinstance(argument(node, "weight"), fx.Node):
            yield f"{name}{node_line(node)}"
    elif name == "mean" and _dynamic(value(node.all_input_nodes[0])):
        yield f"mean{node_line(node)}"
    elif (node.target in _DIVISIONS or name in ("div", "__truediv__")) and len(node.all_input_nodes) == 2:
        below = node.all_input_nodes[1]
        if node.args[1] is below and _counts_batch(recording, below):
            yield f"division{node_line(node)}"


def _dynamic(tensor: object) -> bool:
    """Return whether a size of a tensor depends on values."""
    return isinstance(tensor, Tensor) and any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _counts_batch(recording: Recording, node: fx.Node) -> bool:
    """Return whether a number depends on the batch and constants alone."""
    origins = [recording.origins[read] for read in upstream([node]) if read.op == "placeholder"]
    return bool(origins) and all(isinstance(origin, Batch) for origin in origins)
