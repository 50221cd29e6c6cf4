"""Writes every attention over [batch, heads, sequence, head size], the dimensions that its rules know.

PyTorch takes operands of any rank from two up, broadcasts them, and takes masks of fewer dimensions. As
there, the third dimension from the end is that of heads, also in [batch * heads, sequence, head size].
"""

import math
from collections.abc import Sequence

import torch
from torch import fx

from piper.capture.shard.reshapes import tensor_of
from piper.capture.shard.shape_rules import operand

aten = torch.ops.aten
MASK = 3  # its position among the arguments
WEIGHTS = "piper_weights"  # under which a node's meta keeps the shape of the weights in the program


def in_four_dimensions(graph: fx.Graph) -> None:
    """Expand and reshape the operands of each attention to four dimensions, and its result back."""
    writer = _Writer(graph)
    for node in list(graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            with graph.inserting_before(node):
                writer.rewrite(node)


class _Writer:
    """Writes reshapes into a graph, each once for all the attentions that read it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.written: dict[tuple[fx.Node, object, tuple[int, ...]], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> None:
        """Give an attention operands of four dimensions."""
        result = _shape(node)
        *batch, heads = (1,) * (4 - len(result)) + result[:-2]
        args = list(node.args)
        node.meta[WEIGHTS] = (*result[:-1], _shape(operand(node, 1))[-2])
        for position in range(3):
            x = operand(node, position)
            own = _shape(x)[-3] if node.kwargs.get("enable_gqa") else heads
            args[position] = self._in_four(node, x, (*batch, own, *_shape(x)[-2:]))
        if len(args) > MASK and isinstance(mask := args[MASK], fx.Node):
            full = (1,) * (len(batch) + 3 - len(_shape(mask))) + _shape(mask)
            lead = [1] * len(batch) if math.prod(full[:-3]) == 1 else batch
            args[MASK] = self._in_four(node, mask, (*lead, *full[-3:]))
        node.args = tuple(args)
        if len(result) == 4:
            return
        users = list(node.users)
        with self.graph.inserting_after(node):
            back = self.graph.call_function(aten.reshape.default, (node, list(result)))
        back.meta = dict(node.meta)
        node.meta["val"] = tensor_of(node).new_empty((math.prod(batch), heads, *result[-2:]))
        for user in users:
            user.replace_input_with(node, back)

    def _in_four(self, node: fx.Node, x: fx.Node, full: Sequence[int]) -> fx.Node:
        """Return an operand expanded to a shape, of which all but the last three dimensions become one."""
        if math.prod(_shape(x)) != math.prod(full):
            x = self._reshaped(node, aten.expand.default, x, full)
        return self._reshaped(node, aten.reshape.default, x, (math.prod(full[:-3]), *full[-3:]))

    def _reshaped(self, node: fx.Node, target: object, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        if _shape(x) == tuple(shape):
            return x
        key = (x, target, tuple(shape))
        if key not in self.written:
            reshaped = self.graph.call_function(target, (x, list(shape)))  # type: ignore[arg-type]
            reshaped.meta = dict(x.meta if x.op == "call_function" else node.meta)
            reshaped.meta["val"] = tensor_of(x).new_empty(tuple(shape))
            self.written[key] = reshaped
        return self.written[key]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor_of(node).shape)
