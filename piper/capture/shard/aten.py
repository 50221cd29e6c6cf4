"""Writes a recorded forward in ATen operations: few enough that each can have a rule of its own."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument, map_aggregate

from piper.capture.shard.compute_rules import POINTWISE
from piper.capture.shard.rewrites import in_four_dimensions, without_vmap, without_writes
from piper.capture.shard.rules import RULES
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import Mode, Recording, number_regions
from piper.capture.trace_errors import quiet, reason
from piper.errors import CaptureError

aten = torch.ops.aten
KEPT_WHOLE = frozenset(
    (
        aten.narrow.Tensor,  # sizes of its result depend on values
        aten.tensor_split.tensor_indices_or_sections,
        aten.batch_norm.default,  # its parts write running statistics, and no schema says so
        aten.instance_norm.default,
    )
)
FIXES_GRADIENTS = "torch_nn._linear_cross_entropy"
MODE = "piper_mode"  # under which a node's annotations, which a trace keeps, have the mode it ran in


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
        if of_tensors and not kept & {*op.tags} and op not in KEPT_WHOLE:
            composites[op] = op.decompose
    return composites


def as_aten(recording: Recording, *, exact: bool = False) -> Recording:
    """Return the recording in ATen operations that autograd knows: `linear`, attention and losses stay whole.

    Each operation keeps the annotations, the source line and the gradient mode of the call that made it.
    Autocasts become explicit casts. exact: casts to float32 become casts to float64. It is the same for all
    shardings of a recording, so it is written once: the caller changes nothing in it.
    """
    known, key = recording.in_aten, (exact, frozenset(RULES))
    examples = (node.meta["example_value"] for node in recording.origins)
    mode = next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))
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
    in_four_dimensions(graph)
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
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _widened)
            node.target = {"float": "double", Tensor.float: Tensor.double}.get(node.target, node.target)
        if getattr(node.target, "__name__", "") == "_get_data_attr":  # x.data: to a trace it is a constant
            node.target = Tensor.detach
    modes = {copies[node]: mode for node, mode in recording.modes.items()}
    return fx.GraphModule(recording.root, source), modes


def _widened(given: Argument) -> Argument:
    return torch.float64 if given is torch.float32 else given


def _traced(interpreter: "_Interpreter", placeholders: list[fx.Node], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace a recorded graph again, on fakes like those of its placeholders, in ATen operations."""
    examples = [node.meta["example_value"] for node in placeholders]
    # Operations that have no rule are written in others, which have one or may have.
    parts = {op: parts for op, parts in _composites().items() if op not in RULES and op not in POINTWISE}
    with quiet(), torch.no_grad(), mode, traceback.preserve_node_meta():
        given = [torch.empty(tuple(t.shape), dtype=t.dtype, device=t.device) for t in examples]
        try:
            return make_fx(interpreter.run, parts, pre_dispatch=True)(*given)
        except (RuntimeError, TypeError, ValueError) as error:  # of any operation that the model calls
            raise CaptureError(
                "the model cannot be written in ATen operations, so it cannot be sharded",
                by="shard",
                facts={"why": reason(error)},
                hint="shard only regions without data-dependent code, or leave out the axis",
            ) from error


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
