"""Captures a model and its loss without allocating the model, and cuts them into chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.assemble import Assembler
from piper.capture.blame import quiet, refused
from piper.capture.cut import cut
from piper.capture.library import Library
from piper.capture.means import uneven_means
from piper.capture.piece import Piece
from piper.capture.record import LossFn, record
from piper.capture.recording import Recording
from piper.capture.regions import Regions, find_regions
from piper.capture.rewrite import simplify, value
from piper.capture.sizes import Sizes, dtype_name
from piper.collector import no_collection
from piper.errors import CaptureError
from piper.ir.chunk import Buffer, Outline, Parameter

Precision = Literal["fp32", "bf16", "fp64"]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A captured model, cut into chunks that are not yet differentiated."""

    outline: Outline
    rows: int
    pieces: tuple[Piece, ...]  # one for each chunk of the outline
    constants: Mapping[str, Tensor]
    library: Library  # the code of its chunks, as far as it has been asked for
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
) -> Traced:
    """Capture `loss_fn(model_fn(), batch)` for a slice of `rows` samples.

    Nothing is allocated: the model is built of fakes on the device it will run on. `batch` only gives names,
    shapes and types. compiled: its code is to be compiled, and traced in the operations that takes.
    """
    check_batch(batch, rows)
    dtype, device = DTYPES[precision], torch.device(device)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = build_fake(model_fn, mode, dtype, device)
    with mode:
        fakes = {
            name: torch.empty(
                (rows, *field.shape[1:]),
                dtype=dtype if field.is_floating_point() else field.dtype,
                device=device,
            )
            for name, field in batch.items()
        }
    recording = record(model, loss_fn, fakes)
    means = uneven_means(recording, rows)
    pieces, assembler = _cut(recording)
    loss, *weight = (assembler.output(node) for node in assembler.recording.results)
    outline = Outline(
        chunks=tuple(piece.chunk for piece in pieces),
        loss=loss,
        weight=weight[0] if weight else None,
        parameters=parameters_of(model),
        buffers=buffers_of(model),
        batch={name: Sizes().spec(fake) for name, fake in fakes.items()},
        rows=rows,
    )
    return Traced(
        outline=outline,
        rows=rows,
        pieces=tuple(pieces),
        constants=recording.constants,
        library=Library(device, compiled=compiled),
        means=means,
    )


def _cut(recording: Recording) -> tuple[list[Piece], Assembler]:
    entangled = simplify(recording)
    regions = find_regions(recording, entangled)
    recording, regions = _own_results(recording, regions)
    assembler = Assembler(recording, regions, cut(recording, regions, entangled))
    return assembler.pieces(), assembler


def _own_results(recording: Recording, regions: Regions) -> tuple[Recording, Regions]:
    """Let a weight that no chunk computes (a batch field, a constant) be copied in the loss's chunk."""
    loss, *rest = recording.results
    results, homes, order, modes = [loss], dict(regions.homes), dict(regions.order), dict(recording.modes)
    for node in rest:
        if node in homes:
            results.append(node)
            continue
        copy = recording.graph.call_function(torch.clone, (node,))
        copy.meta["example_value"] = value(node)
        homes[copy], modes[copy], order[copy] = homes[loss], modes[loss], len(order)
        results.append(copy)
    return replace(recording, results=tuple(results), modes=modes), replace(regions, homes=homes, order=order)


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
    model_fn: Callable[[], nn.Module], mode: FakeTensorMode, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Build the model of fakes, with its floating-point state in the type that computes."""
    with quiet(), mode, device:
        try:
            model = model_fn()
        except Exception as error:
            hint = "the model is built without memory: its constructor may not read a tensor's values"
            raise refused("the model cannot be built", error, hint=hint) from error
        if not isinstance(model, nn.Module):
            raise CaptureError(
                "the model is not a module",
                by="model",
                facts={"got": type(model).__name__},
                hint="model is a function that returns an nn.Module: model=lambda: Decoder(config)",
            )
        _cast(model, dtype)
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers, keeping ties: what was one tensor stays one."""
    done: dict[int, Tensor] = {}
    kept = []  # identities are only unique while their tensors live
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                    continue
                if id(tensor) not in done:
                    cast = tensor.detach().to(dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    done[id(tensor)] = nn.Parameter(cast, tensor.requires_grad) if is_parameter else cast
                    kept.append(tensor)
                held[name] = done[id(tensor)]  # type: ignore[assignment]


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    """Every parameter once, with the other names of a tied one."""
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
    """Every buffer once."""
    passing = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return tuple(
        Buffer(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            nbytes=tensor.numel() * tensor.element_size(),
            persistent=name not in passing,
        )
        for name, tensor in model.named_buffers()
    )
