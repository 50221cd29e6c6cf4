"""Traces a chunk forward and backward as one graph, and says what each of its inputs and outputs means."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from piper.capture.aliases import label_memory
from piper.capture.blame import quiet, reason
from piper.capture.pieces import Body
from piper.capture.sizes import Sizes

_ROWS_WHILE_TRACING = 1013  # a prime that no real size equals: nothing may be concluded from it


class Untraceable(RuntimeError):
    """A chunk that cannot be traced forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A body's forward and backward in one graph of functional operations. Positions are those of the body."""

    module: fx.GraphModule
    inputs: Mapping[int, fx.Node]
    params: Mapping[int, fx.Node]
    buffers: Mapping[int, fx.Node]
    tangents: Mapping[int, fx.Node]  # by output
    outputs: Sequence[fx.Node]
    mutated: Mapping[int, fx.Node]  # a buffer's new value
    grad_inputs: Mapping[int, fx.Node]
    grad_params: Mapping[int, fx.Node]
    sizes: Sizes


def trace_joint(
    body: Body, trained: Sequence[bool], tangents: Sequence[int], ways: int, device: torch.device
) -> Joint:
    """Trace a body; gradients flow from the outputs in `tangents` to the inputs that need one and to what trains."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    module = fx.GraphModule(body.root, _with_results(body, tangents))
    with quiet(), contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.enable_grad())
        try:
            rows = _unknown_rows(shapes) if body.experts else None
            fakes = _fakes(body, trained, ways, mode, device, rows)
            traced = aot_export_joint_with_descriptors(stack, module, fakes).graph_module
        except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, KeyError) as error:
            raise Untraceable(reason(error)) from error
    label_memory(traced.graph)
    return _described(traced, body, _sizes(body, rows, shapes))


def _sizes(body: Body, rows: torch.SymInt | None, shapes: ShapeEnv) -> Sizes:
    """How to read the sizes of the trace. Refuses a trace that is only right for the rows it was made with."""
    if rows is None or body.experts is None:
        return Sizes()
    if not isinstance(rows.node.expr, sympy.Symbol) or shapes.replacements:
        raise Untraceable("it works for one number of rows only")
    return Sizes({str(rows): body.experts.rows}, frozenset((str(rows),)))


def _unknown_rows(shapes: ShapeEnv) -> torch.SymInt:
    """A number of rows of which the trace knows nothing but that it is a size."""
    source = ConstantSource("rows")
    symbol = shapes.create_symbol(_ROWS_WHILE_TRACING, source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = shapes.create_symintnode(symbol, hint=_ROWS_WHILE_TRACING, source=source)
    assert isinstance(rows, torch.SymInt)
    return rows


def _with_results(body: Body, tangents: Sequence[int]) -> fx.Graph:
    """The body's graph, with every result a tensor of its own, and no gradient where none is asked for."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = []
    for index, node in enumerate(next(iter(reversed(body.graph.nodes))).args[0]):  # type: ignore[arg-type]
        copy = copies[node] if index in tangents else graph.call_method("detach", (copies[node],))
        # The copy keeps views of inputs and of one another apart; where it is not needed it is dropped again.
        results.append(graph.call_method("clone", (copy,), {"memory_format": torch.contiguous_format}))
    graph.output(tuple(results))
    return graph


def _fakes(
    body: Body,
    trained: Sequence[bool],
    ways: int,
    mode: FakeTensorMode,
    device: torch.device,
    rows: torch.SymInt | None,
) -> tuple[Tensor, ...]:
    """Stand-ins for what the body reads, all contiguous; in an expert region the part of one of `ways` devices."""

    def fake(first: Sequence[int | torch.SymInt], like: Tensor, grad: bool) -> Tensor:
        shape = [*first, *(int(size) for size in like.shape[len(first) :])]
        return torch.empty(shape, dtype=like.dtype, device=device).requires_grad_(grad)  # type: ignore[arg-type]

    def share(tensor: Tensor) -> Sequence[int]:
        """The first axis of what is divided by expert."""
        return () if rows is None else [tensor.shape[0] // ways]

    def routed(index: int) -> Sequence[int | torch.SymInt]:
        """The first axis of the rows or the counts that were routed here."""
        if rows is None or body.experts is None:
            return ()
        return [body.experts.total // ways if body.experts.counts[index] else rows]

    with mode:
        return (
            *(fake(routed(index), tensor, tensor.requires_grad) for index, tensor in enumerate(body.inputs)),
            *(fake(share(tensor), tensor, grad) for tensor, grad in zip(body.params, trained, strict=True)),
            *(fake(share(tensor), tensor, False) for tensor in body.buffers),
        )


def _described(traced: fx.GraphModule, body: Body, sizes: Sizes) -> Joint:
    """Sort the joint graph's inputs and outputs by what torch says they are."""
    first_param = len(body.inputs)
    first_buffer = first_param + len(body.params)
    inputs: dict[int, fx.Node] = {}
    params: dict[int, fx.Node] = {}
    buffers: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["desc"]:
            case aot.PlainAOTInput(idx=index):
                if index < first_param:
                    inputs[index] = node
                elif index < first_buffer:
                    params[index - first_param] = node
                else:
                    buffers[index - first_buffer] = node
            case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
                tangents[index] = node
            case other:
                raise Untraceable(f"torch passes it {other}")
    outputs: dict[int, fx.Node] = {}
    mutated: dict[int, fx.Node] = {}
    grads: dict[int, fx.Node] = {}
    last = next(iter(reversed(traced.graph.nodes)))
    for node, desc in zip(last.args[0], last.meta["desc"], strict=True):
        match desc:
            case aot.PlainAOTOutput(idx=index):
                outputs[index] = node
            case aot.GradAOTOutput(grad_of=aot.PlainAOTInput(idx=index)):
                if node is not None:
                    grads[index] = node
            case aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=index)) if index >= first_buffer:
                mutated[index - first_buffer] = node
            case None:
                pass
            case other:
                raise Untraceable(f"torch makes it return {other}")
    return Joint(
        module=traced,
        inputs=inputs,
        params=params,
        buffers=buffers,
        tangents=tangents,
        outputs=[outputs[index] for index in range(len(outputs))],
        mutated=mutated,
        grad_inputs={index: node for index, node in sorted(grads.items()) if index < first_param},
        grad_params={index - first_param: node for index, node in sorted(grads.items()) if index >= first_param},
        sizes=sizes,
    )
