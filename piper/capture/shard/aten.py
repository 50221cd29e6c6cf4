"""Writes a recorded forward in ATen operations: few enough that each can have a rule of its own.

What runs under vmap, as functions of single indices do in `create_block_mask` and in the masks of
`transformers`, becomes operations on whole tensors. Assignments to a part of a value, by which latent
attention fills queries and keys, and routers their scores, become operations that make a new value:

q = empty(4, 8); q[:, :2] = x; q[:, 2:] = y; scores.scatter_(1, index, z)
-->
q = cat([x, y], 1); scores = scatter(scores, 1, index, z)

Every attention gets operands of [batch, heads, sequence, head size]. PyTorch takes operands of any rank from
two up, and broadcasts them. As there, the third dimension from the end is that of heads, also in
[batch * heads, sequence, head size]. A mask has four dimensions or fewer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument, map_aggregate, map_arg

from piper.capture.quirks.module_methods import leaving_modules
from piper.capture.shard.compute_rules import POINTWISE, by_family
from piper.capture.shard.layout import read_later, tensor_of, value_of
from piper.capture.shard.rules import RULES
from piper.capture.shard.shape_rules import number, operand
from piper.capture.trace.effects import argument, draws, writes
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import Mode, Recording, number_regions
from piper.capture.trace_errors import quiet, reason
from piper.errors import CaptureError

aten = torch.ops.aten
SIZED = {aten.narrow.Tensor, aten.tensor_split.tensor_indices_or_sections}  # by values, which are not known
WRITES = {aten.batch_norm.default, aten.instance_norm.default}  # in their parts, and no schema says so
FIXES_GRADIENTS = "torch_nn._linear_cross_entropy"
MODE = "piper_mode"  # under which a node's annotations, which a trace keeps, have the mode it ran in
PARTS = (aten.slice.Tensor, aten.select.int)
VIEWS = (*PARTS, aten.view.default, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.dim)
EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
_attention = aten.scaled_dot_product_attention.default


@cache
def _composites() -> Mapping[OpOverload, Callable[..., object]]:
    """Return the operations on tensors that torch writes in others, which autograd then differentiates.

    One whose parts draw, write or depend on values stays whole, so that a refusal names it.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    kept = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape}
    composites = {}
    for packet, _, overload in (name.removeprefix("aten::").partition(".") for name in names):
        if "::" in packet:  # of another namespace
            continue
        op: OpOverload = getattr(getattr(aten, packet), overload or "default")
        results = [str(result.type) for result in op._schema.returns]
        of_tensors = results and all("Tensor" in kind for kind in results) and not op._schema.is_mutable
        if of_tensors and not kept & {*op.tags} and op not in SIZED | WRITES:
            composites[op] = op.decompose
    return composites


def as_aten(recording: Recording, *, exact: bool = False) -> Recording:
    """Return the recording in ATen operations that autograd knows: `linear`, attention and losses stay whole.

    Each operation keeps the annotations, the source line and the gradient mode of the call that made it.
    Autocasts become explicit casts. exact: casts to float32 become casts to float64. It is the same for all
    shardings of a recording, so it is written once: the caller changes nothing in it.
    """
    known, key = recording.in_aten, (exact, frozenset(RULES))
    mode = _mode_of(recording.origins)
    # An earlier sharding of this recording leaves the sizes of its routed rows.
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()
    if key not in known:
        known[key] = _written(recording, mode, exact=exact)
    return known[key]


def _written(recording: Recording, mode: FakeTensorMode, *, exact: bool) -> Recording:
    """Write a recording in ATen operations. mode: that of its fakes."""
    placeholders = recording.graph.find_nodes(op="placeholder")
    traced = _traced(_Interpreter(*_copy_of(recording, exact=exact)), placeholders, mode)
    graph = traced.graph
    without_writes(graph)
    graph.eliminate_dead_code()
    if any(str(node.target).startswith(FIXES_GRADIENTS) for node in graph.nodes):
        raise CaptureError(
            "linear_cross_entropy with options decides which gradients it computes before it is sharded",
            by="shard",
            hint="leave out its `options`, or call piper.losses.fused_cross_entropy",
        )
    results = graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    inputs = dict(zip(graph.find_nodes(op="placeholder"), placeholders, strict=True))
    for new, old in inputs.items():
        new.meta["example_value"] = old.meta["example_value"]
    noted: dict[fx.Node, Mode] = {}
    for node in graph.nodes:
        custom = dict(node.meta.get("custom") or {})
        noted[node] = custom.pop(MODE, Mode())
        if WEIGHT in custom:
            node.meta[WEIGHT] = custom.pop(WEIGHT)
        node.meta["custom"] = custom
    return replace(
        recording,
        graph=graph,
        root=traced,
        origins={new: recording.origins[old] for new, old in inputs.items()},
        results=tuple(node for node in results if isinstance(node, fx.Node)),
        # Regions without operations count, as they did before it was sharded.
        tags=number_regions({node: node.meta["custom"] for node in graph.nodes}, recording.regions),
        modes={node: noted[node] for node in graph.nodes if node.op not in ("placeholder", "output")},
        bundles={},
        checkpoints=(),
    )


def _copy_of(recording: Recording, *, exact: bool) -> tuple[fx.GraphModule, dict[fx.Node, Mode]]:
    """Return a copy of a recorded graph, and the modes of its nodes. exact: it casts to float64, not float32.

    Nodes note their gradient mode, and the weight of a linear layer, as annotations: a trace keeps these.
    """
    source = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    source.graph_copy(recording.graph, copies)
    for node, copy in copies.items():
        mode = Mode(grad=recording.modes[node].grad) if node in recording.modes else Mode()
        marks = {WEIGHT: node.meta[WEIGHT]} if WEIGHT in node.meta else {}
        copy.meta["custom"] = {**(node.meta.get("custom") or {}), MODE: mode, **marks}
    source.output(tuple(copies[result] for result in recording.results))
    without_vmap(source, recording.root, {copies[n]: bundle for n, bundle in recording.bundles.items()})
    for node in source.nodes:
        if exact and node.op in ("call_function", "call_method"):
            given = (node.args, node.kwargs)
            node.args, node.kwargs = map_aggregate(
                given, lambda x: torch.float64 if x is torch.float32 else x
            )
            node.target = {"float": "double", Tensor.float: Tensor.double}.get(node.target, node.target)
        if getattr(node.target, "__name__", "") == "_get_data_attr":  # x.data: to a trace it is a constant
            node.target = Tensor.detach
    modes = {copies[node]: mode for node, mode in recording.modes.items()}
    return fx.GraphModule(recording.root, source), modes


def _traced(interpreter: "_Interpreter", placeholders: list[fx.Node], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace a recorded graph again, on fakes like those of its placeholders, in ATen operations."""
    # Operations that have no rule are written in others, which have one or may have.
    parts = {op: parts for op, parts in _composites().items() if op not in RULES and op not in POINTWISE}
    parts[_attention] = in_four_dimensions
    with quiet(), leaving_modules(), torch.no_grad(), mode, traceback.preserve_node_meta():
        try:
            return make_fx(interpreter.run, parts, pre_dispatch=True)(*_fakes_like(placeholders))
        except (RuntimeError, TypeError, ValueError) as error:  # of any operation that the model calls
            raise CaptureError(
                "the model cannot be written in ATen operations, so it cannot be sharded",
                by="shard",
                facts={"why": reason(error)},
                hint="shard only regions without data-dependent code, or leave out the axis",
            ) from error


def in_four_dimensions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *rest: float,
    enable_gqa: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend with operands that are expanded and reshaped to four dimensions."""
    operands = query, key, value
    shapes = [x.shape for x in (*operands, mask) if x is not None]
    batch = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    heads = query.shape[-3:-2] if enable_gqa else torch.broadcast_shapes(*(shape[-3:-2] for shape in shapes))

    def in_four(x: Tensor, batch: Sequence[int], heads: Sequence[int]) -> Tensor:
        full = (*batch, *heads, *x.shape[-2:])
        x = x if x.shape == full else x.expand(full)
        return x if len(full) == 4 else x.reshape(math.prod(batch), math.prod(heads), *x.shape[-2:])

    reshaped = [in_four(x, batch, x.shape[-3:-2] if enable_gqa else heads) for x in operands]
    if all(x is old for x, old in zip(reshaped, operands, strict=True)):
        return NotImplemented  # type: ignore[no-any-return]  # it stays as it is
    if mask is not None and mask.dim() > 3 and len(batch) > 1:
        same = math.prod(mask.shape[:-3]) == 1  # for all samples
        mask = in_four(mask, [1] * len(batch) if same else batch, mask.shape[-3:-2])
    result: Tensor = _attention(*reshaped, mask, *rest, scale=scale, enable_gqa=enable_gqa)
    return result if len(batch) == len(heads) == 1 else result.reshape(*batch, *heads, *result.shape[-2:])


class _Interpreter(fx.Interpreter):
    """Runs a recorded graph, each node in the autocasts it was recorded in."""

    def __init__(self, module: fx.GraphModule, modes: Mapping[fx.Node, Mode]) -> None:
        super().__init__(module)
        self.modes = modes

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 (the signature is torch's)
        with ExitStack() as stack:
            for arguments in self.modes.get(n, Mode()).autocast:
                entered = autocast_mode._enter_autocast(*arguments)
                stack.callback(autocast_mode._exit_autocast, entered)
            return super().run_node(n)


def without_vmap(graph: fx.Graph, root: nn.Module, bundles: Mapping[fx.Node, int]) -> None:
    """Replace each bundle of a graph by the operations that vmap makes of it, in place."""
    for bundle in dict.fromkeys(bundles.values()):
        nodes = [node for node in graph.nodes if bundles.get(node) == bundle]
        inside = set(nodes)
        reads = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        traced = _traced_alone(nodes, reads, results, root).graph
        copies = dict(zip(traced.find_nodes(op="placeholder"), reads, strict=True))
        with graph.inserting_before(results[0]):
            output = graph.graph_copy(traced, copies)
        for node, copy in copies.items():
            if node.op != "placeholder":
                copy.meta = {**results[0].meta, "example_value": node.meta["val"]}
        assert isinstance(output, list | tuple)
        for old, new in zip(results, output, strict=True):
            old.replace_all_uses_with(new)
        for node in reversed(nodes):
            graph.erase_node(node)


def _traced_alone(
    nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node], root: nn.Module
) -> fx.GraphModule:
    """Trace some nodes of a graph as a function of what they read."""
    alone = fx.Graph()
    copies = {node: alone.placeholder(node.name) for node in reads}
    for node in nodes:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(tuple(copies[node] for node in results))
    with leaving_modules(), _mode_of(reads), torch.no_grad():
        return make_fx(fx.Interpreter(fx.GraphModule(root, alone)).run)(*_fakes_like(reads))


def _mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """Return the mode of the fakes that nodes have."""
    examples = (node.meta["example_value"] for node in nodes)
    mode: FakeTensorMode = next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))
    return mode


def _fakes_like(nodes: Iterable[fx.Node]) -> list[Tensor]:
    """Return new fakes of the shapes and types that nodes have."""
    examples = [node.meta["example_value"] for node in nodes]
    return [torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device) for x in examples]


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
        if len(views) == 1 and (node.target in RULES or by_family(node) is not None):
            continue
        later = read_later(views[0], node)
        known = all(name.op == "call_function" and (name in views or not later[name]) for name in later)
        if known and tensor_of(views[-1]).is_contiguous():  # as the new value will be
            with graph.inserting_before(node), torch.no_grad():
                _rewrite(node, _new_part(node, functional, views), views, later)
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
    node: fx.Node, new: fx.Node, views: list[fx.Node], later: Mapping[fx.Node, list[fx.Node]]
) -> None:
    """Write the new value of each value that a new part belongs to, and the views of that."""
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
        start = number(argument(whole, "start")) % size if argument(whole, "step") == 1 else -1
        if start in parts:
            return  # a part was written again
        parts[start] = operand(whole, 1)
        whole = operand(whole)
    starts = sorted(parts)
    ends = [0, *accumulate(int(tensor_of(parts[start]).shape[dim]) for start in starts)]
    if whole.target in EMPTY and [*starts, size] == ends:
        with node.graph.inserting_before(node):
            joined = node.graph.call_function(aten.cat.default, ([parts[start] for start in starts], dim))
        joined.meta = node.meta
        node.replace_all_uses_with(joined)
