"""Captures a model and its loss without allocating the model, and cuts them into chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.trace.assemble import Assembler, CapturedChunk
from piper.capture.trace.build_model import buffers_of, build_fake, parameters_of
from piper.capture.trace.cut import Regions, cut, find_regions
from piper.capture.trace.functionalize import simplify, value
from piper.capture.trace.hooks import check_hooks
from piper.capture.trace.linear_layers import mark_products
from piper.capture.trace.record import LossFn, record
from piper.capture.trace.recording import Recording
from piper.capture.trace.sizes import SymbolicSizes
from piper.errors import LossError
from piper.ir.chunk import CapturedModel
from piper.ir.dtypes import DTYPES, JobPrecision
from piper.process.gc_pause import no_collection


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A captured model, cut into chunks that are not yet differentiated."""

    outline: CapturedModel
    pieces: tuple[CapturedChunk, ...]  # one for each chunk of the outline
    device: torch.device  # that it will run on
    compiled: bool  # the code will be compiled
    recording: Recording  # the graph that was cut into the pieces
    exact: bool = False  # it computes in fp64, so nothing may be cast down on the way


@no_collection()
def trace(
    model_fn: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Mapping[str, Tensor],
    rows: int,
    precision: JobPrecision = "fp32",
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
    model, fakes, _ = on_fakes(model_fn, batch, rows, precision, device)
    built(model)
    check_hooks(model, loss_fn)
    if forward_only:
        model.eval().requires_grad_(False)
    try:
        recording = record(model, loss_fn, fakes, forward_only=forward_only)
    except LossError as error:
        samples = len(next(iter(batch.values())))
        if rows == samples:
            raise
        # A batch norm that gets one sample raises, and the whole batch alone would not show it.
        part = f"{rows} of {samples} samples, which is what a device computes at a time"
        raise error.located(error.by, {"slice": part}) from error.__cause__
    mark_products(recording)
    outline, pieces = cut_model(recording)
    filled = {pair for chunk in outline.chunks for pair in chunk.tags}
    outline = replace(
        outline,
        metric_names=recording.metrics,
        parameters=parameters_of(model),
        buffers=buffers_of(model),
        batch={name: SymbolicSizes().spec(fake) for name, fake in fakes.items()},
        rows=rows,
        empty={pair: place for pair, place in recording.places.items() if pair not in filled},
    )
    return Traced(
        outline=outline,
        pieces=pieces,
        device=torch.device(device),
        compiled=compiled,
        recording=recording,
        exact=precision == "fp64",
    )


def on_fakes(
    model_fn: Callable[[], nn.Module],
    batch: Mapping[str, Tensor],
    rows: int,
    precision: JobPrecision,
    device: str | torch.device,
) -> tuple[nn.Module, dict[str, Tensor], FakeTensorMode]:
    """Return the model and `rows` samples like those of a batch, of fakes, and the mode of these."""
    dtype, device = getattr(torch, DTYPES[precision]), torch.device(device)
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
    return model, fakes, mode


def cut_model(recording: Recording) -> tuple[CapturedModel, tuple[CapturedChunk, ...]]:
    """Cut a recording into the pieces of its chunks. Return them behind an outline of chunks and results."""
    entangled = simplify(recording)
    regions = find_regions(recording, entangled)
    recording, regions = _own_results(recording, regions)
    assembler = Assembler(recording, regions, cut(recording, regions, entangled))
    pieces = tuple(assembler.pieces())
    loss, *others = (assembler.output(node) for node in recording.results)
    weight = others.pop(0) if recording.weighted else None
    chunks, metrics = tuple(piece.chunk for piece in pieces), others[0] if others else None
    return CapturedModel(chunks=chunks, loss=loss, weight=weight, metrics=metrics), pieces


def _own_results(recording: Recording, regions: Regions) -> tuple[Recording, Regions]:
    """Let a weight that no chunk computes (a batch field, a constant) be copied in the loss's chunk."""
    region_of, order, modes = dict(regions.region_of), dict(regions.order), dict(recording.modes)
    loss, results = recording.results[0], list(recording.results)
    for place, node in enumerate(results):
        if node not in region_of:
            results[place] = copy = recording.graph.call_function(torch.clone, (node,))
            copy.meta["example_value"] = value(node)
            region_of[copy], modes[copy], order[copy] = region_of[loss], modes[loss], len(order)
    recording = replace(recording, results=tuple(results), modes=modes)
    return recording, replace(regions, region_of=region_of, order=order)
