"""Finds the products of linear layers and of experts: a value times a weight, in a type that may be narrower.

Three kinds of products are left alone. Attention multiplies no weight. A router's scores decide where rows
go, and a head's scores are what the loss compares; both are known by what reads them: no further product
lies between them and a choice, or between them and the loss.
"""

import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from piper.capture.trace.effects import name_of
from piper.capture.trace.functionalize import memory_of, value
from piper.capture.trace.recording import FromParameter, Recording

WEIGHT = "weight of a linear layer"  # of a marked node: the name of its weight
_MULTIPLIES = re.compile(
    r"(.*_)?(matmul|mm|bmm|addmm|baddbmm|linear|bilinear|einsum|tensordot|conv[123]d|attention(_forward)?|"
    r"lstm|gru|rnn_tanh|rnn_relu)"
)
_CHOICES = ("topk", "sort", "argsort", "argmax", "argmin", "multinomial")
_LINEAR = (F.linear, torch.ops.aten.linear.default)
_PLAIN = (operator.matmul, torch.matmul, torch.mm, torch.ops.aten.matmul.default, torch.ops.aten.mm.default)
_ADDED = (torch.addmm, torch.ops.aten.addmm.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProduct:
    """The factors of `x @ weight.T + bias`, or of `x @ weight` where the weight is stored transposed."""

    x: fx.Node
    weight: fx.Node
    bias: object = None
    transposed: bool = False


def factors_of(node: fx.Node) -> LinearProduct | None:
    """Return the factors of a node that may be the product of a linear layer. None: it is another node."""
    args = node.args
    if node.op == "call_function" and node.target in _LINEAR:
        x, weight, bias, *_ = (*args, *(None,) * 3)
        x, weight = x or node.kwargs.get("input"), weight or node.kwargs.get("weight")
        bias, transposed = bias if bias is not None else node.kwargs.get("bias"), False
    elif node.op == "call_function" and node.target in _ADDED and len(args) == 3 and not node.kwargs:
        (bias, x, weight), transposed = args, True
    elif (
        (node.op == "call_function" and node.target in _PLAIN)
        or (node.op == "call_method" and node.target in ("matmul", "mm"))
    ) and len(args) == 2:
        (x, weight), bias, transposed = args, None, True
    else:
        return None
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    return LinearProduct(x=x, weight=weight, bias=bias, transposed=transposed)


def is_grouped(node: fx.Node) -> bool:
    """Return whether a node multiplies rows by the weights of experts."""
    return node.op == "call_function" and str(node.target) in ("piper.grouped_mm.default", "piper.grouped_mm")


def weight_of(node: fx.Node) -> fx.Node | None:
    """Return the weight of what may be a product of a linear layer or of experts. None: it is none."""
    if is_grouped(node):
        return node.args[1] if isinstance(node.args[1], fx.Node) else None
    product = factors_of(node)
    return None if product is None else product.weight


def mark_products(recording: Recording) -> None:
    """Note on each product of a linear layer, or of experts, the name of its weight."""
    # A weight counts if it is a parameter, or a view of one, and nothing but such products reads it. So a
    # weight has one precision.
    owners = {
        memory_of(node): origin.name
        for node, origin in recording.origins.items()
        if isinstance(origin, FromParameter)
    }
    scores = _scores(recording.graph, set(recording.results))
    products: dict[str, list[fx.Node]] = {}
    others: set[str] = set()  # parameters that something else reads too
    for node in recording.graph.nodes:
        read = {name for each in node.all_input_nodes if (name := owners.get(memory_of(each))) is not None}
        product, weight = factors_of(node), weight_of(node)
        name = None if weight is None else owners.get(memory_of(weight))
        fits = name is not None and (product is None or _fits(product)) and not recording.modes[node].autocast
        if name is not None and fits and node not in scores:
            products.setdefault(name, []).append(node)
            read.discard(name)
        if memory_of(node) not in owners:  # else it is a view of a parameter
            others |= read
    for name, nodes in products.items():
        alike = len(set(map(is_grouped, nodes))) == 1
        for node in nodes if alike and name not in others else ():
            node.meta[WEIGHT] = name


def multiplies(node: fx.Node) -> bool:
    """Return whether a node is a product of any kind: of matrices, a convolution, attention."""
    if node.op not in ("call_function", "call_method"):
        return False
    return _MULTIPLIES.fullmatch(name_of(node).partition(".")[0]) is not None


def _fits(product: LinearProduct) -> bool:
    """Return whether the factors are rows and one matrix, of one type."""
    x, weight = value(product.x), value(product.weight)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return False
    return x.dim() > 1 and weight.dim() == 2 and x.dtype == weight.dtype


def _scores(graph: fx.Graph, results: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose values reach a choice or a result of the loss without a further product."""
    scores: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in results or any(
            name_of(user) in _CHOICES or (user in scores and not multiplies(user)) for user in node.users
        ):
            scores.add(node)
    return scores


def weights_of(nodes: Sequence[fx.Node], *, rowwise: bool = False) -> tuple[str, ...]:
    """Return the weights of marked products, once. rowwise: only those multiplied as stored, [out, in]."""
    marked = [node for node in nodes if WEIGHT in node.meta]
    left_out = {node.meta[WEIGHT] for node in marked if rowwise and not _as_stored(node)}
    return tuple(name for name in dict.fromkeys(n.meta[WEIGHT] for n in marked) if name not in left_out)


def _as_stored(node: fx.Node) -> bool:
    product = factors_of(node)
    return product is not None and not product.transposed and product.weight.op == "placeholder"
