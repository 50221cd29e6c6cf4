"""Recognises what attention need not be given: masks that are causal, and heads that repeat others."""

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_arg

from piper.capture.shard.reshapes import RESHAPES, value_of
from piper.capture.shard.shape_rules import argument
from piper.capture.shard.sharder import Sharder, aten

LARGEST = 2**26  # elements of a mask that is evaluated to see whether it is causal
CAUSAL = "piper_causal"  # under which a mask's meta keeps the answer
HEADS = 1  # dimension of [batch, heads, sequence, head size]


def is_causal(node: fx.Node) -> bool:
    """Return whether each query sees the keys up to its own place, by a flag or by a mask that says so."""
    mask = argument(node, 3, "attn_mask")
    if not isinstance(mask, fx.Node):
        return bool(argument(node, 5, "is_causal", False))
    if CAUSAL not in mask.meta:
        mask.meta[CAUSAL] = _is_causal_mask(mask)
    return bool(mask.meta[CAUSAL])


def _is_causal_mask(mask: fx.Node) -> bool:
    """Evaluate a mask that depends on no input, as `transformers` makes them, and compare it."""
    made = value_of(mask)
    if not isinstance(made, Tensor) or made.dtype is not torch.bool or made.dim() < 2:
        return False
    if made.shape[-1] != made.shape[-2] or made.numel() > LARGEST:
        return False
    found: dict[fx.Node, object] = {}
    stack, order = [mask], dict[fx.Node, None]()
    while stack:
        node = stack.pop()
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return False
        order.pop(node, None)
        order[node] = None
        stack += node.all_input_nodes
    for node in sorted(order, key=list(mask.graph.nodes).index):
        found[node] = _evaluated(node, found)
    wanted = torch.ones(made.shape[-2:], dtype=torch.bool).tril()
    value = found[mask]
    return isinstance(value, Tensor) and bool((value == wanted).all())


def _evaluated(node: fx.Node, found: dict[fx.Node, object]) -> object:
    """Run an operation on the host."""

    def on_host(argument: Argument) -> Argument:
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args = fx.node.map_aggregate(map_arg(node.args, found.__getitem__), on_host)  # type: ignore[arg-type]
    kwargs = fx.node.map_aggregate(map_arg(node.kwargs, found.__getitem__), on_host)  # type: ignore[arg-type]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def unrepeated(d: Sharder, x: fx.Node) -> fx.Node:
    """Return keys or values before their heads are repeated for groups of heads of queries."""
    repeated, expanded = x, x.all_input_nodes[0] if x.all_input_nodes else x
    single = expanded.all_input_nodes[0] if expanded.all_input_nodes else expanded
    kinds = (
        repeated.target in RESHAPES
        and expanded.target is aten.expand.default
        and single.target is aten.unsqueeze.default
    )
    if not kinds:
        return x
    base = single.all_input_nodes[0]
    batch, heads, *rest = d.shape(base)
    apart = d.shape(expanded)
    right = len(apart) == 5 and apart[:2] == (batch, heads) and list(apart[3:]) == rest
    right = right and d.shape(single) == (batch, heads, 1, *rest)
    return base if right and d.shape(repeated) == (batch, heads * apart[2], *rest) else x
