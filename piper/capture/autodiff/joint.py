"""Traces a chunk forward and backward as one graph, and sorts its inputs and outputs by meaning."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.compile.operators import DECOMPOSITIONS
from piper.capture.cost.aliases import label_memory
from piper.capture.precision.fp8 import REWRITTEN, merge_rounding
from piper.capture.quirks.attention_sums import correct_sums
from piper.capture.quirks.module_methods import leaving_modules
from piper.capture.quirks.random_states import no_random_states
from piper.capture.trace.assemble import Body
from piper.capture.trace.effects import name_of
from piper.capture.trace.sizes import SymbolicSizes, unknown_rows
from piper.capture.trace_errors import quiet, reason


class UntraceableError(RuntimeError):
    """A chunk that cannot be traced forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A body's forward and backward as one graph of functional operations. Positions count in the body."""

    graph: fx.Graph
    root: nn.Module  # holds the graph's attributes
    inputs: Mapping[int, fx.Node]
    params: Mapping[int, fx.Node]
    buffers: Mapping[int, fx.Node]
    tangents: Mapping[int, fx.Node]  # by output
    outputs: Sequence[fx.Node]
    mutated: Mapping[int, fx.Node]  # a buffer's new value
    grad_inputs: Mapping[int, fx.Node]
    grad_params: Mapping[int, fx.Node]
    sizes: SymbolicSizes


def trace_joint(
    body: Body,
    trained: Sequence[bool],
    tangents: Sequence[int],
    device: torch.device,
    *,
    decompose: bool = False,  # into what Inductor compiles, so that a partition sees what it will fuse
) -> Joint:
    """Trace a body, with gradients from the outputs in `tangents` to trained parameters and to inputs."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    # Nothing here calls the code of a graph module, and writing it takes a twentieth of the time.
    with quiet(), _use_lazy_graph_module(True), contextlib.ExitStack() as stack:
        module = _make_graph_module(body.root, _with_results(body, tangents))
        stack.enter_context(leaving_modules())
        stack.enter_context(no_random_states())
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.enable_grad())
        if any(name_of(node) == "lstm" for node in body.graph.nodes if node.op == "call_function"):
            # Its kernel of oneDNN is for inference: without autograd it leaves out what its backward reads.
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        try:
            rows = unknown_rows(shapes) if body.experts else None
            fakes = _fakes(body, trained, mode, device, rows)
            table = {**decompositions()} if decompose else {torch.ops.aten.copy.default: _copied}
            exported = aot_export_joint_with_descriptors(stack, module, fakes, decompositions=table)
            traced = exported.graph_module
        # The user's functions, their derivatives and torch's tracer raise any of these on code that cannot be
        # traced. The chunk then runs under eager autograd, and its reason names the error.
        except (RuntimeError, AssertionError, TypeError, ValueError, KeyError) as error:
            raise UntraceableError(reason(error)) from error
    correct_sums(traced.graph)
    _correct(traced.graph)
    if any(node.target in REWRITTEN for node in body.graph.nodes):
        merge_rounding(traced.graph)
    label_memory(traced.graph)
    sizes = SymbolicSizes()
    if rows is not None and body.experts is not None:
        if not rows.node.expr.is_symbol:
            raise UntraceableError("it works for one number of rows only")
        sizes = SymbolicSizes({str(rows): body.experts.rows}, frozenset((str(rows),)))
    return _described(traced, body, sizes)


def _copied(place: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what `copy_` leaves in a place, by operations with derivatives: `aten.copy` has none."""
    return value.to(place.dtype).expand(place.shape).clone()


@functools.cache
def decompositions() -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    """Return Inductor's decompositions, without those of random operations and with our own."""
    from torch._inductor import config  # takes a second to import, and only compiled code needs it
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return {**select_decomp_table(), **DECOMPOSITIONS}


def _correct(graph: fx.Graph) -> None:
    """Remove operations that return their argument as it is, and give zeros memory."""
    # Torch adds aliases where Python happens to hold one more reference to a value, as while a profiler
    # looks. Equal models would then have unequal graphs, which are not found in the cache.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    # The zeros of autograd, as in the gradient of `sgn`, have no memory that could be added to.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._efficientzerotensor.default):
        node.target = torch.ops.aten.zeros.default
        node.meta["val"] = node.meta["val"].clone()


def _with_results(body: Body, tangents: Sequence[int]) -> fx.Graph:
    """Return the body's graph with a copy around every result. Detach the results that need no gradient."""
    graph = fx.Graph()
    returned = graph.graph_copy(body.graph, {})
    assert isinstance(returned, tuple)
    results = []
    for index, result in enumerate(returned):
        copy = result if index in tangents else graph.call_method("detach", (result,))
        # The copy separates views of inputs and of one another. A later pass drops it where it is not needed.
        results.append(graph.call_method("clone", (copy,), {"memory_format": torch.contiguous_format}))
    graph.output(tuple(results))
    return graph


def _fakes(
    body: Body,
    trained: Sequence[bool],
    mode: FakeTensorMode,
    device: torch.device,
    rows: torch.SymInt | None,  # of an expert region
) -> tuple[Tensor, ...]:
    """Stand-ins for what the body reads, all dense."""

    def fake(like: Tensor, grad: bool, *first: int | torch.SymInt) -> Tensor:
        shape = [*first, *(int(size) for size in like.shape[len(first) :])]
        where = like.device if like.device.type == "cpu" else device  # some numbers are the host's
        return torch.empty(shape, dtype=like.dtype, device=where).requires_grad_(grad)

    first: list[tuple[int | torch.SymInt, ...]] = [()] * len(body.inputs)
    if rows is not None and body.experts is not None:
        first = [(body.experts.total if counts else rows,) for counts in body.experts.counts]
    state = [*zip(body.params, trained, strict=True), *((buffer, False) for buffer in body.buffers)]
    with mode:
        inputs = [
            fake(tensor, tensor.requires_grad, *n) for tensor, n in zip(body.inputs, first, strict=True)
        ]
        return (*inputs, *(fake(tensor, grad) for tensor, grad in state))


def _described(traced: fx.GraphModule, body: Body, sizes: SymbolicSizes) -> Joint:
    """Sort the joint graph's inputs and outputs by what torch says they are."""
    plain: dict[int, fx.Node] = {}  # arguments by position
    tangents: dict[int, fx.Node] = {}  # by output
    outputs: dict[int, fx.Node] = {}
    mutated: dict[int, fx.Node] = {}  # new values and gradients of arguments, by position
    grads: dict[int, fx.Node] = {}
    last = next(iter(reversed(traced.graph.nodes)))
    given = [(node, node.meta["desc"]) for node in traced.graph.find_nodes(op="placeholder")]
    returned = zip(last.args[0], last.meta["desc"], strict=True)
    for node, described in [*given, *(pair for pair in returned if None not in pair)]:
        match described:
            case aot.PlainAOTInput(idx=index):
                plain[index] = node
            case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
                tangents[index] = node
            case aot.PlainAOTOutput(idx=index):
                outputs[index] = node
            case aot.GradAOTOutput(grad_of=aot.PlainAOTInput(idx=index)):
                grads[index] = node
            case aot.InputMutationAOTOutput(mutated_input=aot.PlainAOTInput(idx=index)):
                mutated[index] = node
            case other:
                raise UntraceableError(f"torch makes it take or return {other}")
    first_param = len(body.inputs)
    first_buffer = first_param + len(body.params)
    if any(index < first_buffer for index in mutated):
        raise UntraceableError("it changes an input in place")

    def between(nodes: Mapping[int, fx.Node], begin: int, end: int | None = None) -> dict[int, fx.Node]:
        inside = (index for index in sorted(nodes) if begin <= index and (end is None or index < end))
        return {index - begin: nodes[index] for index in inside}

    return Joint(
        graph=traced.graph,
        root=traced,
        inputs=between(plain, 0, first_param),
        params=between(plain, first_param, first_buffer),
        buffers=between(plain, first_buffer),
        tangents=tangents,
        outputs=[outputs[index] for index in range(len(outputs))],
        mutated=between(mutated, first_buffer),
        grad_inputs=between(grads, 0, first_param),
        grad_params=between(grads, first_param),
        sizes=sizes,
    )
