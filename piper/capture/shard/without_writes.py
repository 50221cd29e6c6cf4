"""Writes assignments to a part of a value as operations that make a new value, which have rules.

q = empty(4, 8); q[:, :2] = x; q[:, 2:] = y; scores.scatter_(1, index, z)
-->
q = cat([x, y], 1); scores = scatter(scores, 1, index, z)

Latent attention fills queries and keys so, and routers their scores.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from piper.capture.shard.compute_rules import by_family
from piper.capture.shard.reshapes import read_later, tensor_of, value_of
from piper.capture.shard.rules import rules
from piper.capture.shard.shape_rules import number, operand
from piper.capture.trace.effects import argument, draws, writes

aten = torch.ops.aten
PARTS = (aten.slice.Tensor, aten.select.int)
VIEWS = (*PARTS, aten.view.default, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.dim)
EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)


def without_writes(graph: fx.Graph) -> None:
    """Replace each write through a view, or by an operation without a rule, by a new value, in place.

    A write stays where what it changes is read later under a name that has no part in the write.
    """
    for node in list(graph.nodes):
        functional = _functional(node)
        if functional is None:
            continue
        views = [writes(node)[0]]
        while views[-1].target in VIEWS:
            views.append(operand(views[-1]))
        if len(views) == 1 and (node.target in rules() or by_family(node) is not None):
            continue
        later = read_later(views[0], node)
        known = all(name.op == "call_function" and (name in views or not later[name]) for name in later)
        if known and tensor_of(views[-1]).is_contiguous():  # as the new value will be
            with graph.inserting_before(node), torch.no_grad():
                _rewrite(node, functional, views, later)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        _join_parts(node)


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the operation that makes a new value where another one writes its first operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or draws(node) or [*writes(node)] != [*node.args[:1]]:
        return None
    packet = getattr(aten, str(target.overloadpacket).removeprefix("aten.").removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def _rewrite(
    node: fx.Node,
    functional: torch._ops.OpOverload,
    views: list[fx.Node],
    later: Mapping[fx.Node, list[fx.Node]],
) -> None:
    """Write the new value of the written part, of each value that it is a part of, and the views of that."""
    new = _new_part(node, functional, views)
    for view, whole in pairwise(views):
        if view.target is aten.slice.Tensor:
            new = _emit(node, aten.slice_scatter.default, whole, new, *view.args[1:], **view.kwargs)
        elif view.target is aten.select.int:
            dim, index = view.args[1], number(view.args[2])
            rows = _emit(node, aten.unsqueeze.default, new, dim)
            new = _emit(node, aten.slice_scatter.default, whole, rows, dim, index, index + 1 or None)
        else:
            new = _emit(node, aten.reshape.default, new, [*tensor_of(whole).shape])
    for view in reversed(views):
        if view is not views[-1]:
            new = _emit(node, view.target, new, *view.args[1:], **view.kwargs)
        for user in later[view]:
            user.replace_input_with(view, new)
    node.replace_all_uses_with(new)


def _new_part(node: fx.Node, functional: torch._ops.OpOverload, views: list[fx.Node]) -> fx.Node:
    """Write what the written part holds after a write."""
    written = tensor_of(node)
    if functional in (aten.copy.default, aten.fill.Tensor):  # autograd does not know the first
        new = _emit(node, aten.expand.default, node.args[1], [*written.shape])
        if not any(view.target in PARTS for view in views):  # later writes must leave what was copied
            new = _emit(node, aten.clone.default, new, memory_format=torch.contiguous_format)
    else:
        new = _emit(node, functional, *node.args, **node.kwargs)
    if (tensor_of(new).device, tensor_of(new).dtype) == (written.device, written.dtype):
        return new
    return _emit(node, aten.to.device, new, written.device, written.dtype)


def _emit(node: fx.Node, target: object, *args: Argument, **kwargs: Argument) -> fx.Node:
    """Write an operation where a write was."""
    assert isinstance(target, torch._ops.OpOverload)
    new = node.graph.call_function(target, args, kwargs)
    values, named = map_arg((args, kwargs), value_of)  # type: ignore[arg-type]  # fakes are no arguments
    new.meta = {**node.meta, "val": target(*values, **named)}
    return new


def _join_parts(node: fx.Node) -> None:
    """Join the parts that an empty value was filled with along one dimension."""
    parts: dict[int, fx.Node] = {}  # by where each begins
    whole, rank = node, tensor_of(node).dim()
    dim = number(argument(node, "dim")) % rank
    size = int(tensor_of(node).shape[dim])
    while whole.target is aten.slice_scatter.default and number(argument(whole, "dim")) % rank == dim:
        part = whole.args[1]
        assert isinstance(part, fx.Node)
        start = number(argument(whole, "start")) % size if argument(whole, "step") == 1 else -1
        if start in parts:
            return  # a part was written again
        parts[start] = part
        whole = operand(whole)
    starts = sorted(parts)
    ends = [0, *accumulate(int(tensor_of(parts[start]).shape[dim]) for start in starts)]
    if whole.target in EMPTY and [*starts, size] == ends:
        with node.graph.inserting_before(node):
            joined = node.graph.call_function(aten.cat.default, ([parts[start] for start in starts], dim))
        joined.meta = node.meta
        node.replace_all_uses_with(joined)
