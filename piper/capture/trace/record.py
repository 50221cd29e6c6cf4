"""Records one forward and loss as a single graph, with the region and mode of each call."""

import logging
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.fx.node import Argument

from piper import errors
from piper.capture.quirks.cached_properties import reading_cached_properties
from piper.capture.quirks.causal_masks import masks_as_given
from piper.capture.quirks.checkpoints import tracing_into_checkpoints
from piper.capture.quirks.class_texts import reading_class_texts
from piper.capture.quirks.layerdrop import no_layer_dropped
from piper.capture.quirks.logging_calls import leaving_out_logs
from piper.capture.quirks.output_recorders import asking_no_context
from piper.capture.quirks.side_effects import Left, Place, noting_changes
from piper.capture.quirks.tensor_attributes import leaving_out_assignments
from piper.capture.trace.annotate import Region, begin_trace, entered_regions, listed_regions
from piper.capture.trace.hooks import no_tensor_hooks
from piper.capture.trace.left_state import after_another, as_left, described, left_behind, same_calls
from piper.capture.trace.recording import (
    FromBuffer,
    FromParameter,
    Mode,
    Origin,
    Recording,
    number_regions,
)
from piper.capture.trace.returned import Prediction, Returned, check_prediction, not_a_loss, returned_by_loss
from piper.capture.trace_errors import drawn_once, loss_failed, node_line, quiet, reason, without_result
from piper.errors import CaptureError, PiperError
from piper.ir.chunk import Batch, Constant
from piper.process.flex_on_host import flex_gradients_on_host

log = logging.getLogger("piper")
_LATER_CALLS = 2  # traced at most: the second may find tables that the first made, no later one makes more
# A module's buffers or parameters, or one of these, as Dynamo names what it found
_STATE = re.compile(r"L\['self'\]((?:\._modules\['[^']+'\])+)\.(?:__dict__\[')?_(?:buffers|parameters)\b")
LossFn = Callable[[nn.Module, dict[str, Tensor]], object]


class LossModule(nn.Module):
    """The module that is traced: the user's loss of the user's model."""

    def __init__(self, model: nn.Module, loss: LossFn) -> None:
        super().__init__()
        self.model = model
        self.loss = (loss,)  # in a tuple: a loss that is itself a module must not become a submodule

    def forward(self, batch: dict[str, Tensor]) -> object:
        begin_trace()
        return self.loss[0](self.model, batch)


def record(
    model: nn.Module, loss: LossFn, batch: dict[str, Tensor], *, forward_only: bool = False
) -> Recording:
    """Trace `loss(model, batch)`, all of it, into one graph. forward_only: nothing is trained."""
    step = LossModule(model, loss)
    with quiet(), entered_regions() as entered:
        try:
            call = _traced_call(step, batch)
        except CaptureError:
            raise
        except Exception as error:
            if without_result(error):
                raise not_a_loss("it returns no tensor") from error
            raise _own_error(error, step, batch) or loss_failed(error, batch) from error
        _check_replaced(call.left.values())
        captured = call.module
        returned = _structure(captured, loss, batch)
        _check_later_calls(step, batch, call)
    tensors = dict(zip(captured.graph.find_nodes(op="placeholder"), call.read, strict=True))
    regions = [*listed_regions(model), *entered]
    recording = _GraphCopier(captured, tensors, _sources(model, batch), regions).read(returned, forward_only)
    return replace(recording, checkpoints=call.checkpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """The graph of one call, and what it does not show."""

    module: fx.GraphModule
    read: Sequence[object]  # of each placeholder
    checkpoints: tuple[str, ...]  # the lines that call them
    left: Mapping[Place, Left]  # what the forward leaves behind


def _traced_call(step: LossModule, batch: dict[str, Tensor]) -> TracedCall:
    """Let Dynamo trace one call."""
    settings = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,  # a second capture with other sizes is as static as the first
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=True,
        allow_rnn=True,
    )
    with (
        settings,
        no_tensor_hooks(),
        no_layer_dropped(step.model),
        leaving_out_logs(),
        leaving_out_assignments(),
        reading_class_texts(),
        reading_cached_properties(),
        asking_no_context(),
        masks_as_given(),
        flex_gradients_on_host(),
        tracing_into_checkpoints() as checkpoints,
        noting_changes() as left,
    ):
        module = dynamo_graph_capture_for_export(step)(batch)
    read = module.graph._codegen.process_inputs(batch)
    return TracedCall(module=module, read=read, checkpoints=tuple(checkpoints), left=left)


def _check_later_calls(step: LossModule, batch: dict[str, Tensor], first: TracedCall) -> None:
    """Trace a second call if the first changed something, and refuse one that computes something else."""
    call, changes = first, first.left
    for _ in range(_LATER_CALLS if changes else 0):
        with entered_regions(), as_left(changes.values()):
            try:
                later = _traced_call(step, batch)
            except Exception as error:  # noqa: BLE001  that of a second call alone says nothing about the first
                log.info("What the forward leaves behind is not checked: %s", reason(error))
                return
        graphs = call.module.graph, later.module.graph
        if same_calls(*graphs, (call.read, later.read), tuple(changes.values())):
            return
        call, changes = later, after_another(changes, later.left)
    if changes:
        raise left_behind(described(changes.values()))


def _own_error(error: Exception, step: LossModule, batch: dict[str, Tensor]) -> PiperError | None:
    """Return the error of ours that a loss raised, such as one of `piper.losses`. None: it raised none."""
    # Dynamo cannot trace how such an error is made, and reports that instead. So the loss runs again without
    # it, on the same fakes.
    traced = [frame.filename for frame in getattr(error, "real_stack", None) or ()]
    if not traced or traced[-1] != errors.__file__:
        return None
    try:
        step(batch)
    except PiperError as own:
        return own
    return None


def _check_replaced(left: Iterable[Left]) -> None:
    """Refuse a forward that replaces a buffer: a trace only sees values, so the new one would be lost."""
    # What is put back, as `torch.func.functional_call` does it, is not left behind.
    for each in left:
        if held := _STATE.match(each.source):
            path = re.findall(r"'([^']+)'", held[1])[1:]
            raise CaptureError(
                "the forward replaces a buffer or parameter",
                by="model",
                facts={"module": ".".join(path) or "the model itself"},
                hint="change a buffer in place: self.steps.add_(1), not self.steps = self.steps + 1",
            )


def _sources(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[int, Origin]:
    """Return where each tensor comes from, by identity. A tied parameter goes by its first name."""
    sources: dict[int, Origin] = {}
    for name, parameter in model.named_parameters():
        sources.setdefault(id(parameter), FromParameter(name=name))
    for name, buffer in model.named_buffers():
        sources.setdefault(id(buffer), FromBuffer(name=name))
    return {**sources, **{id(tensor): Batch(field=name) for name, tensor in batch.items()}}


def _structure(captured: fx.GraphModule, loss: LossFn, batch: dict[str, Tensor]) -> Returned:
    """Return what the loss returned, with graph nodes in place of computed tensors."""
    try:
        returned = captured.graph._codegen.process_outputs(captured.graph.output_node().args[0])
    except AttributeError as error:  # a Python number is read off a tensor after the graph
        raise not_a_loss("it returns a Python number") from error
    if isinstance(loss, Prediction):
        check_prediction(returned, len(next(iter(batch.values()))))
        return Returned(values=(returned,), predicts=True)
    return returned_by_loss(returned)


class _GraphCopier:
    """Copies a captured graph without the nodes that compute nothing, and notes what those meant."""

    def __init__(
        self,
        captured: fx.GraphModule,
        tensors: Mapping[fx.Node, object],
        sources: Mapping[int, Origin],
        regions: Sequence[Region],
    ) -> None:
        self.captured, self.tensors, self.sources, self.regions = captured, tensors, sources, regions
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[int, fx.Node] = {}  # placeholders by their tensor's identity
        self.origins: dict[fx.Node, Origin] = {}
        self.constants: dict[str, Tensor] = {}
        self.modes: dict[fx.Node, Mode] = {}
        self.bundles: dict[fx.Node, int] = {}
        self.mode = Mode()
        self.outside: dict[fx.Node, bool] = {}  # whether autograd records around each inference_mode
        self.depth = 0
        self.bundle = 0

    def read(self, returned: Returned, forward_only: bool) -> Recording:
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                self._input(node, self.tensors[node])
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op != "output" and not self._context(node):
                self._copy(node)
        _check_scores(self.graph)
        results = tuple(self._result(value) for value in returned.values)
        if not returned.predicts:
            _check_results(results, forward_only)
        if returned.metrics:
            loss = results[0].meta["example_value"]
            with loss.fake_mode:  # all sums and weights in one tensor of float64
                pairs = returned.metrics.items()
                numbers = [self._number(name, number, loss) for name, pair in pairs for number in pair]
                results = (*results, self._call(torch.stack, numbers))
        marks = {node: node.meta.get("custom") or {} for node in self.graph.nodes}
        return Recording(
            graph=self.graph,
            root=self.root,
            origins=self.origins,
            results=results,
            weighted=len(returned.values) > 1,
            metrics=tuple(returned.metrics),
            tags=number_regions(marks, self.regions),
            regions=tuple(self.regions),
            modes=self.modes,
            bundles=self.bundles,
            constants=self.constants,
        )

    def _input(self, node: fx.Node, tensor: object) -> fx.Node:
        """Make one placeholder for a tensor that comes from outside, even if it has several names."""
        if id(tensor) not in self.inputs:
            origin = self.sources.get(id(tensor)) or self._constant(node, tensor)
            copy = self.graph.placeholder(node.name)
            copy.meta["example_value"] = node.meta.get("example_value", tensor)
            self.origins[copy], self.inputs[id(tensor)] = origin, copy
        self.copies[node] = self.inputs[id(tensor)]
        return self.copies[node]

    def _constant(self, node: fx.Node, tensor: object) -> Constant:
        if str(node.target).startswith("random_value_"):  # Dynamo's name for what Python's random drew
            raise drawn_once(node)
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or tensor.requires_grad:
            hint = "make it known: self.register_buffer(name, tensor, persistent=False)"
            modules = self.captured.named_modules()
            held = ((path, name) for path, m in modules for name in vars(m) if vars(m)[name] is tensor)
            owner, name = next(held, ("", str(node.target)))
            if isinstance(tensor, nn.Parameter):  # one that the model registers is known
                hint = "make it a parameter of the model, which the loss gets: only those are trained"
            elif owner:  # the class of which may not be the user's
                code = re.sub(r"\.(\d+)", r"[\1]", owner)  # model.layers.0 is no Python
                register = f"{code}.register_buffer({name!r}, vars({code}).pop({name!r}), persistent=False)"
                hint += f"; outside the class: {register}"
            raise CaptureError(
                "the model uses a tensor that is neither a parameter nor a buffer",
                by="model",
                facts={"tensor": f"{owner}.{name}".removeprefix("model.").removeprefix(".")},
                hint=hint,
            )
        self.constants[node.name] = tensor.detach().contiguous()
        return Constant(name=node.name)

    def _attribute(self, node: fx.Node) -> None:
        """Read a tensor as a constant; keep the graph that a higher-order operation runs."""
        attribute = operator.attrgetter(str(node.target))(self.captured)
        if isinstance(attribute, Tensor):
            self._input(node, attribute)
        else:
            self._copy(node)
            self.copies[node].target = node.name
            setattr(self.root, node.name, attribute)

    def _copy(self, node: fx.Node) -> None:
        copy = self.graph.node_copy(node, lambda used: self.copies[used])
        self.copies[node], self.modes[copy] = copy, self.mode
        if self.depth:
            self.bundles[copy] = self.bundle

    def _context(self, node: fx.Node) -> bool:
        """Return whether a node computes nothing. If it opens or closes a mode, note that."""
        target = node.target
        if target is torch._C._set_grad_enabled:
            self.mode = replace(self.mode, grad=bool(node.args[0]))
        elif target is grad_mode._enter_inference_mode:
            self.outside[node], self.mode = self.mode.grad, replace(self.mode, grad=not node.args[0])
        elif target is grad_mode._exit_inference_mode:
            self.mode = replace(self.mode, grad=self.outside[node.all_input_nodes[0]])
        elif target is autocast_mode._enter_autocast:
            self.mode = Mode(grad=self.mode.grad, autocast=(*self.mode.autocast, node.args))
        elif target is autocast_mode._exit_autocast:
            self.mode = Mode(grad=self.mode.grad, autocast=self.mode.autocast[:-1])
        elif (name := getattr(target, "__name__", "")).endswith("_increment_nesting"):
            self.bundle += not self.depth
            self.depth += 1
            return False  # vmap's levels are part of what runs, so they stay, with all between them
        elif name.endswith("_decrement_nesting"):
            self._copy(node)
            self.depth -= 1
        else:
            return name in ("lazy_load_decompositions", "_log_api_usage_once") or "_assert" in str(target)
        return True

    def _result(self, value: object) -> fx.Node:
        """Return the node of a value that the loss returned, even if that value is an input."""
        if isinstance(value, fx.Node):
            return self.copies[value]
        return self._input(fx.Graph().placeholder("result"), value)

    def _number(self, name: str, number: object, loss: FakeTensor) -> fx.Node:
        """Return the node of a metric's sum or weight, which may be a Python number."""
        if isinstance(number, int | float):
            return self._call(torch.full, (), float(number), dtype=torch.float64, device=loss.device)
        node = self._result(number)
        value = node.meta["example_value"]
        if value.dim():
            raise not_a_loss(f"its metric {name!r} has a part of shape {list(value.shape)}")
        return self._call(torch.Tensor.to, self._call(torch.Tensor.detach, node), torch.float64)

    def _call(self, function: Callable[..., Tensor], *arguments: Argument, **options: Argument) -> fx.Node:
        """Add a call to the graph, with the value it has for the traced batch."""
        node = self.graph.call_function(function, arguments, options)
        values = fx.map_arg(arguments, lambda used: used.meta["example_value"])
        node.meta["example_value"] = function(*values, **options)
        self.modes[node] = Mode()
        return node


def _check_scores(graph: fx.Graph) -> None:
    """Refuse a `flex_attention` whose scores are trained: its backward gives that gradient inside a tuple."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention):
        reads = node.args[7] if len(node.args) > 7 else ()
        for read in reads if isinstance(reads, list | tuple) else ():
            if isinstance(read, fx.Node) and read.meta["example_value"].requires_grad:
                raise CaptureError(
                    f"the score_mod of flex_attention reads {read.name}, which is trained",
                    by=f"flex_attention{node_line(node)}",
                    hint="add a learned bias through the attn_mask of scaled_dot_product_attention",
                )


def _check_results(results: tuple[fx.Node, ...], forward_only: bool) -> None:
    values = [node.meta["example_value"] for node in results]
    for what, value in zip(("loss", "weight"), values, strict=False):
        if value.dim():
            raise not_a_loss(f"its {what} has shape {list(value.shape)}")
    if len(values) == 2 and values[1].requires_grad:
        raise CaptureError(
            "the weight of the loss depends on parameters",
            by="loss" + node_line(results[1]),
            facts={"but": "gradients are those of the sum, divided by the total weight of the batch"},
            hint="detach it: return loss, weight.detach(); or return a mean, whose gradient is that of both",
        )
    if not values[0].requires_grad and not forward_only:
        raise CaptureError(
            "the loss does not depend on any trainable parameter",
            by="loss" + node_line(results[0]),
            hint="check for detach(), no_grad() and requires_grad=False between the parameters and the loss",
        )
