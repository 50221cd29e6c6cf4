"""Captures a model and its loss without allocating the model, and cuts them into chunks."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.autodiff.code_cache import CodeCache
from piper.capture.divide.request import Request, divide_model
from piper.capture.trace.assemble import Assembler
from piper.capture.trace.blame import quiet, refused
from piper.capture.trace.cut import cut
from piper.capture.trace.functionalize import simplify, value
from piper.capture.trace.hooks import check_hooks
from piper.capture.trace.linear_layers import mark_products
from piper.capture.trace.piece import CapturedChunk
from piper.capture.trace.record import LossFn, record
from piper.capture.trace.recording import Recording
from piper.capture.trace.regions import Regions, find_regions
from piper.capture.trace.sizes import SymbolicSizes, dtype_name
from piper.capture.trace.uneven_means import uneven_means
from piper.errors import CaptureError, PiperError
from piper.experts import choose_experts
from piper.ir.chunk import Buffer, CapturedModel, Output, Parameter, Tags
from piper.process.attributes import replaced
from piper.process.gc_pause import no_collection

Precision = Literal["fp32", "bf16", "fp64"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A captured model, cut into chunks that are not yet differentiated."""

    outline: CapturedModel
    rows: int
    pieces: tuple[CapturedChunk, ...]  # one for each chunk of the outline
    constants: Mapping[str, Tensor]
    library: CodeCache  # the code of its chunks, traced on demand
    recording: Recording  # the graph that was cut into the pieces
    exact: bool = False  # it computes in fp64, so nothing may be cast down on the way
    means: tuple[str, ...] = ()  # operations of the loss that divide by a number of the data


@no_collection()
def trace(
    model_fn: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    rows: int,
    precision: Precision = "fp32",
    device: str | torch.device = "cpu",
    *,
    compiled: bool = False,
    forward_only: bool = False,
    built: Callable[[nn.Module], None] = lambda model: None,
) -> Traced:
    """Capture `loss_fn(model_fn(), batch)` for a slice of `rows` samples.

    Nothing is allocated: the model is built of fakes on the device it will run on. `batch` only gives names,
    shapes and types. compiled: the code will be compiled, and is traced into operations for the compiler.
    forward_only: capture the model as `model.eval()` makes it, with nothing to train.
    built: is called with the model when it is built, before it is traced.
    """
    check_batch(batch, rows)
    dtype, device = DTYPES[precision], torch.device(device)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = build_fake(model_fn, mode, dtype, device)
    built(model)
    check_hooks(model, loss_fn)
    if forward_only:
        model.eval().requires_grad_(False)
    fakes = fake_batch(batch, rows, mode, dtype, device)
    recording = record(model, loss_fn, fakes, forward_only=forward_only)
    means = uneven_means(recording, rows)
    mark_products(recording)
    pieces, assembler = _cut(recording)
    results = results_of(assembler)
    outline = CapturedModel(
        chunks=tuple(piece.chunk for piece in pieces),
        loss=results.loss,
        weight=results.weight,
        metrics=results.metrics,
        metric_names=recording.metrics,
        parameters=parameters_of(model),
        buffers=buffers_of(model),
        batch={name: SymbolicSizes().spec(fake) for name, fake in fakes.items()},
        rows=rows,
        empty=_empty(recording, pieces),
    )
    return Traced(
        outline=outline,
        rows=rows,
        pieces=tuple(pieces),
        constants=recording.constants,
        library=CodeCache(device, compiled=compiled),
        recording=recording,
        exact=precision == "fp64",
        means=means,
    )


def fake_batch(
    batch: Mapping[str, Tensor], rows: int, mode: FakeTensorMode, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return `rows` samples like those of a batch, as fakes."""
    with mode:
        return {
            name: torch.empty(
                (rows, *field.shape[1:]),
                dtype=dtype if field.is_floating_point() else field.dtype,
                device=device,
            )
            for name, field in batch.items()
        }


def divided(traced: Traced, requests: Sequence[Request]) -> Traced:
    """Return the model as one device of its groups computes it, cut into chunks and collectives."""
    made = divide_model(
        traced.recording, requests, traced.outline.parameters, traced.outline.batch, exact=traced.exact
    )
    pieces, assembler = _cut(made.recording)
    results = results_of(assembler)
    outline = replace(
        traced.outline,
        chunks=tuple(piece.chunk for piece in pieces),
        loss=results.loss,
        weight=results.weight,
        metrics=results.metrics,
        parameters=made.parameters,
        fields=made.batch,
        degrees=degrees_of(requests),
    )
    return replace(traced, outline=outline, pieces=tuple(pieces), recording=made.recording)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The outputs of chunks that the loss returns."""

    loss: Output
    weight: Output | None
    metrics: Output | None


def results_of(assembler: Assembler) -> Results:
    """Return which outputs of chunks are the loss, its weight and its metrics."""
    recording = assembler.recording
    loss, *others = (assembler.output(node) for node in recording.results)
    weight = others.pop(0) if recording.weighted else None
    return Results(loss=loss, weight=weight, metrics=others[0] if others else None)


def degrees_of(requests: Sequence[Request]) -> dict[Tags, int]:
    """Return how many devices share the same samples, for each region that is divided."""
    found: dict[Tags, int] = {}
    for request in requests:
        for tags in request.regions:
            found[tags] = found.get(tags, 1) * request.degree
    return found


def _cut(recording: Recording) -> tuple[list[CapturedChunk], Assembler]:
    entangled = simplify(recording)
    regions = find_regions(recording, entangled)
    recording, regions = _own_results(recording, regions)
    assembler = Assembler(recording, regions, cut(recording, regions, entangled))
    return assembler.pieces(), assembler


def _empty(recording: Recording, pieces: Sequence[CapturedChunk]) -> dict[tuple[str, int], str]:
    """Return the regions that hold no operation, each with its line or modules."""
    held = {pair for piece in pieces for pair in piece.chunk.tags}
    return {pair: place for pair, place in recording.places.items() if pair not in held}


def _own_results(recording: Recording, regions: Regions) -> tuple[Recording, Regions]:
    """Let a weight that no chunk computes (a batch field, a constant) be copied in the loss's chunk."""
    loss, *rest = recording.results
    results, region_of, order, modes = (
        [loss],
        dict(regions.region_of),
        dict(regions.order),
        dict(recording.modes),
    )
    for node in rest:
        if node in region_of:
            results.append(node)
            continue
        copy = recording.graph.call_function(torch.clone, (node,))
        copy.meta["example_value"] = value(node)
        region_of[copy], modes[copy], order[copy] = region_of[loss], modes[loss], len(order)
        results.append(copy)
    return replace(recording, results=tuple(results), modes=modes), replace(
        regions, region_of=region_of, order=order
    )


def check_batch(batch: Mapping[str, Tensor], rows: int) -> None:
    """Refuse a batch that has no samples to slice."""
    if not (
        isinstance(batch, Mapping)
        and batch
        and all(isinstance(name, str) and isinstance(field, Tensor) for name, field in batch.items())
    ):
        raise CaptureError(
            "a batch is a dict of tensors",
            by="batch",
            facts={"got": _kind_of(batch)},
            hint='yield {"tokens": tokens, "labels": labels}, each with one row for each sample',
        )
    counts = {name: field.shape[0] if field.dim() else 0 for name, field in batch.items()}
    for name, count in counts.items():
        if count < rows or count != next(iter(counts.values())):
            raise CaptureError(
                f"{name!r} has too few samples"
                if count < rows
                else "the fields of a batch differ in samples",
                by="batch",
                facts={
                    "samples": ", ".join(f"{field} {number}" for field, number in counts.items()),
                    "needed": f"{rows} in each slice",
                },
                hint="give every field the samples on its first axis, enough for each device and part",
            )


def _kind_of(batch: object) -> str:
    if not isinstance(batch, Mapping):
        return type(batch).__name__
    fields = ", ".join(f"{name!r}: {type(field).__name__}" for name, field in batch.items())
    return f"a dict of {fields}" if fields else "an empty dict"


def build_fake(
    model_fn: Callable[[], nn.Module],
    mode: FakeTensorMode,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Build the model with fake tensors, with its floating-point state in type `dtype`.

    A constructor that reads a tensor's values, as that of `orthogonal` does, gets real tensors instead.
    """
    with quiet():
        shapes, mode.shape_env = mode.shape_env, None  # without symbols, to read a value is an error
        try:
            with mode, device, _converting():
                model = model_fn()
        except DataDependentOutputException:
            model = _build_real(model_fn)
        except PiperError:  # such as one of `annotate_layers`, which says all there is to say
            raise
        except Exception as error:
            raise _not_built(error) from error
        finally:
            mode.shape_env = shapes
        if not isinstance(model, nn.Module):
            raise CaptureError(
                "the model is not a module",
                by="model",
                facts={"got": type(model).__name__},
                hint="model is a function that returns an nn.Module: model=lambda: Decoder(config)",
            )
        _check_types(model)
        _cast(model, dtype, device)
    choose_experts(model, dtype)
    _install_recorders(model)
    return model


def _install_recorders(model: nn.Module) -> None:
    """Install the hooks by which a Hugging Face model records hidden states and router logits.

    It would install them in its first forward, under a lock that cannot be traced.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    for module in model.modules():
        if capturing is not None and hasattr(module, "_can_record_outputs"):
            capturing.maybe_install_capturing_hooks(module)


def _build_real(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Build the model with memory, on the CPU: its constructor reads values, as `orthogonal` does."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # the driver's random state stays as it is
        try:
            return model_fn()
        except PiperError:
            raise
        except Exception as error:
            raise _not_built(error) from error


def _not_built(error: Exception) -> CaptureError:
    hint = "build the model alone, without Piper, to see the whole traceback"
    return refused("the model cannot be built", error, hint=hint)


def _check_types(model: nn.Module) -> None:
    """Refuse complex parameters: norms, sums over devices and optimizers here are of real numbers."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise CaptureError(
                f"the parameter {name} is complex",
                by="model",
                facts={
                    "type": dtype_name(parameter.dtype),
                    "but": "complex parameters cannot be trained here",
                },
                hint="hold it as real numbers: nn.Parameter(torch.view_as_real(w)), and use "
                "torch.view_as_complex(self.w) in the forward; a complex buffer may stay",
            )


def _cast(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Cast floating-point parameters and buffers in place: hooks, ties and lists of parameters keep them.

    Fakes stay fakes, and values that a constructor has read, as `from_pretrained` does, stay values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.dtype != wanted or tensor.device.type != device.type:
            _assign(tensor, tensor.data.to(device, wanted))


def _assign(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another value, of any type and device. It stays the same object."""
    tensor.data = value
    if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device  # which is no part of its data


@contextmanager
def _converting() -> Iterator[None]:
    """Let a constructor convert modules of fakes, as `module.to(dtype)` does: give their tensors other data.

    Torch swaps such a tensor for its converted one, which fails for a fake: weak references to it exist.
    """
    before: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def swap(first: Tensor, second: Tensor) -> None:
        if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
            _assign(first, second.data)
        else:
            before(first, second)

    with replaced(torch.utils, "swap_tensors", swap):
        yield


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    """Return every parameter once, with the other names of a tied one."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=tensor.requires_grad,
            aliases=tuple(names[id(tensor)][1:]),
        )
        for name, tensor in model.named_parameters()
    )


def buffers_of(model: nn.Module) -> tuple[Buffer, ...]:
    """Return every buffer once, with the names a state_dict has for a tied one."""
    passing = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    saved = {key: [name for name in found if name not in passing] for key, found in names.items()}
    return tuple(
        Buffer(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            nbytes=tensor.numel() * tensor.element_size(),
            persistent=bool(saved[id(tensor)]),
            names=tuple(saved[id(tensor)]) if len(names[id(tensor)]) > 1 else (),
        )
        for name, tensor in model.named_buffers()
    )
