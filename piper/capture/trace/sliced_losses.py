"""Finds what the mean over slices of a batch gets wrong in a captured loss: sums over samples, uneven means.

A mean over an axis of fixed size divides every slice of a batch by the same number. These do not: a mean
cross entropy over several labels per sample, because labels can be ignored; one with a weight for each class;
a mean over rows that a mask selects; a sum divided by a count of the batch. Their slices may weigh unevenly.

A loss that is a sum over samples is divided by nothing (`reduction="sum"`, `x.sum()`), or by a number that
does not grow with the batch; the mean over slices is only a part of it. `x.sum() / x.numel()` is a mean: its
divisor does grow. One recording cannot tell the two apart, so the loss is recorded for two sizes of batch,
and what differs between them decides. Where an element of the sum may hold such a divisor itself (softmax
over samples, a division by a count), nothing is said.

A contrastive loss sets each sample against all others. A square matrix of them, whose sides both grow with
the batch, shows it; a slice has only the pairs of its own samples.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from piper.capture.trace.effects import argument, name_of
from piper.capture.trace.functionalize import value
from piper.capture.trace.graph_walks import downstream, reached, upstream
from piper.capture.trace.recording import Recording, live
from piper.capture.trace_errors import node_line
from piper.ir.chunk import Batch

_ENTROPIES = ("cross_entropy", "nll_loss", "cross_entropy_loss")
_DIVISIONS = (operator.truediv, torch.div, torch.true_divide)
_TERMS = re.compile(r"_*r?(add|sub|neg)_*|to|float|double|clone|squeeze|reshape|view|contiguous")
_FACTORS = re.compile(r"_*r?(mul|multiply|(true_?)?div|divide)_*")
_NUMBERS = re.compile(
    r"_*r?(mul|multiply|(true_?)?div|divide|pow)_*|tensor|as_tensor|new_tensor|(new_)?full(_like)?"
)
_PRODUCTS = re.compile(
    r"linear|bilinear|embedding|einsum|tensordot|conv.*|.*m[mv]|matmul|.*attention|.*(loss|entropy).*"
)
_SUMS = re.compile(r"sum|v?dot|inner|(linalg_)?vecdot|_*r?matmul_*|mm|mv|einsum|tensordot")  # to one number
_BY_ELEMENT = re.compile(r"relu|gelu|silu|elu|tanh|sigmoid|(log_)?softmax|dropout|to|clone|contiguous")
Larger = Callable[[], Recording]  # records a loss for a larger batch: only where something looks like a sum
_OVER_AN_AXIS = ("softmax", "log_softmax", "normalize", "cumsum", "cumprod")


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
        classes = labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None
        several = classes is not None and (_dynamic(classes) or classes.numel() > rows)
        if several or isinstance(argument(node, "weight"), fx.Node):
            yield f"{name}{node_line(node)}"
    elif name == "mean" and _dynamic(value(node.all_input_nodes[0])):
        yield f"mean{node_line(node)}"
    elif (node.target in _DIVISIONS or name in ("div", "__truediv__")) and len(node.all_input_nodes) == 2:
        below = node.all_input_nodes[1]
        origins = [recording.origins[read] for read in upstream([below]) if read.op == "placeholder"]
        of_batch = bool(origins) and all(isinstance(origin, Batch) for origin in origins)
        if node.args[1] is below and of_batch:
            yield f"division{node_line(node)}"


def _dynamic(tensor: object) -> bool:
    """Return whether a size of a tensor depends on values."""
    return isinstance(tensor, Tensor) and any(isinstance(size, torch.SymInt) for size in tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSizes:
    """A loss recorded for two sizes of batch, node by node."""

    rows: int  # of the smaller batch
    pairs: dict[fx.Node, fx.Node]  # of the smaller batch, and of the larger one
    samples: int  # of the larger batch
    of_batch: set[fx.Node]  # nodes that depend on the batch

    def grows(self, node: fx.Node) -> bool:
        """Return whether a tensor has as many more elements as the batch has more samples."""
        small, large = value(node), value(self.pairs[node])
        if not isinstance(small, Tensor) or not isinstance(large, Tensor):
            return False
        whole = not _dynamic(small) and not _dynamic(large)
        return whole and large.numel() * self.rows == small.numel() * self.samples

    def along_samples(self, node: fx.Node) -> bool:
        """Return whether an operation may run along an axis that grows with the batch."""
        small, large = value(node), value(self.pairs[node])
        assert isinstance(small, Tensor) and isinstance(large, Tensor), "it grows"
        axes = [n for n in _numbers(node) if isinstance(n, int) and -small.dim() <= n < small.dim()]
        return not axes or any(small.shape[axis] != large.shape[axis] for axis in axes)


def sums_over_samples(few: Recording, rows: int, many: Larger, samples: int) -> tuple[str, ...]:
    """Return each sum over samples in a loss, with its line. many: records the loss for a larger batch."""
    of_batch = _of_batch(few)
    candidates = [] if few.weighted else [*_sums(few, of_batch)]
    if not candidates:
        return ()
    nodes = [*few.graph.nodes], [*many().graph.nodes]
    if [name_of(node) for node in nodes[0]] != [name_of(node) for node in nodes[1]]:
        return ()
    pairs = dict(zip(*nodes, strict=True))
    if any(_NUMBERS.fullmatch(name_of(a)) and _numbers(a) != _numbers(b) for a, b in pairs.items()):
        return ()  # it divides by a number of samples
    both = TwoSizes(rows=rows, pairs=pairs, samples=samples, of_batch=of_batch)
    sums = [
        node
        for node in candidates
        # Of a loss that sums by itself the first operand counts, of a sum all that it multiplies.
        for factors in [node.all_input_nodes if _SUMS.fullmatch(name_of(node)) else node.all_input_nodes[:1]]
        if all(_adds_samples(both, factor) for factor in factors if factor in of_batch)
    ]
    return tuple(dict.fromkeys(f"{name_of(node)}{node_line(node)}" for node in sums))


def compared_samples(few: Recording, rows: int, many: Larger, samples: int) -> tuple[str, ...]:
    """Return each operation that first sets samples against each other, with its line."""
    squares = [*_squares(few, rows)]
    larger = {node.name: node for node in many().graph.nodes} if squares else {}
    pairs = {
        node: f"{name_of(node)}{node_line(node)}"
        for node, side in squares
        if node.name in larger and _square(larger[node.name]) == side * samples // rows
    }
    return tuple(
        dict.fromkeys(text for node, text in pairs.items() if pairs.keys().isdisjoint(node.all_input_nodes))
    )


def _squares(recording: Recording, rows: int) -> Iterator[tuple[fx.Node, int]]:
    """Yield the matrices, with their sides, that may be of pairs of samples and lead to parameters."""
    needed, of_batch = live(recording.graph, recording.results[:1]), _of_batch(recording)
    of_features: set[fx.Node] = set()  # square by chance: as many features as there are samples
    for node in recording.graph.nodes:
        if node in needed and (side := _square(node)) and side % rows == 0:
            if _has_features(node, of_batch, of_features):
                of_features.add(node)
            else:
                yield node, side


def _has_features(node: fx.Node, of_batch: set[fx.Node], of_features: set[fx.Node]) -> bool:
    """Return whether no column of a matrix is a sample. of_features: earlier nodes of which that is known."""
    if name_of(node) == "linear":
        weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
        return isinstance(weight, fx.Node) and weight.op == "placeholder" and weight not in of_batch
    dependent = of_batch.intersection(node.all_input_nodes)
    return bool(_BY_ELEMENT.fullmatch(name_of(node))) and bool(dependent) and dependent <= of_features


def _square(node: fx.Node) -> int:
    """Return the side of a square matrix that is trained through; 0: a node is none."""
    matrix = value(node)
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or not matrix.requires_grad or _dynamic(matrix):
        return 0
    computed = node.op in ("call_function", "call_method")
    return matrix.shape[0] if computed and matrix.shape[0] == matrix.shape[1] else 0


def _sums(recording: Recording, of_batch: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the sums that a loss consists of: itself, its terms, and those times a factor."""
    stack, seen = [recording.results[0]], set[fx.Node]()
    while stack:
        node = stack.pop()
        result = value(node)
        if node in seen or node not in of_batch or not isinstance(result, Tensor) or result.numel() != 1:
            continue
        seen.add(node)
        name = name_of(node)
        if _SUMS.fullmatch(name) or argument(node, "reduction") == "sum":
            yield node
        elif _TERMS.fullmatch(name):
            stack += node.all_input_nodes
        elif _FACTORS.fullmatch(name):
            dependent = [each for each in node.all_input_nodes if each in of_batch]
            if len(dependent) == 1 and (node.args[0] is dependent[0] or "mul" in name):
                stack += dependent


def _adds_samples(both: TwoSizes, summed: fx.Node) -> bool:
    """Return whether a summed tensor has elements of each sample, of a size that no other sample changes."""

    def computed_from(node: fx.Node) -> Iterator[fx.Node]:
        products = _PRODUCTS.fullmatch(name_of(node))
        return (source for source in node.all_input_nodes if source in both.of_batch and not products)

    return all(
        both.grows(node) and not (name_of(node) in _OVER_AN_AXIS and both.along_samples(node))
        for node in reached([summed], computed_from)
    )


def _of_batch(recording: Recording) -> set[fx.Node]:
    """Return the nodes that depend on the batch."""
    return downstream(node for node, origin in recording.origins.items() if isinstance(origin, Batch))


def _numbers(node: fx.Node) -> list[float]:
    """Return the numbers among the arguments of a node."""
    return [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, int | float)]
