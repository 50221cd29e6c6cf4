"""Captures the zoo's models once for all tests, and compares them with plain autograd."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from piper.capture.autodiff.differentiate import Captured, differentiate
from piper.capture.trace.annotate import annotate_modules
from piper.capture.trace.trace import Traced, trace
from piper.ir.chunk_options import CodeOptions
from piper.ir.dtypes import DTYPES, JobPrecision
from piper.models import decoder
from tests import zoo
from tests.capture.machine import Backward, Machine

ROWS = 2  # samples on each device
Batch = dict[str, Tensor]


@cache
def case(name: str) -> zoo.Case:
    """A case of the zoo, smaller where size would show nothing new."""
    found = zoo.case(name)
    match name:
        case "decoder":
            small = decoder.Config.tiny(layers=2, stages=2, tied=True)
            return replace(found, model=lambda: decoder.Decoder(small))
        case "qwen3_hf":
            return replace(found, model=small_qwen3)
        case "frozen":
            return _linear(found, lambda: zoo.freeze(zoo.MLP(3), "layers.0.weight", "layers.2"))
        case "frozen_stage":
            return _linear(found, lambda: zoo.freeze(zoo.MLP(3), "layers.0"))
        case "sum_weight":
            return replace(_linear(found, lambda: zoo.MLP(2)), loss=weighted)
        case _:
            return found


def _linear(found: zoo.Case, model: Callable[[], nn.Module]) -> zoo.Case:
    return replace(found, model=model, loss=zoo.regression, batch=zoo.vectors)


def weighted(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum over the entries that count, and their number."""
    wanted = batch["y"].to(torch.float64)
    counted = wanted > 0
    error = (model(batch["x"].to(torch.float64)) - wanted) ** 2
    return (error * counted).sum(), counted.sum()


def small_qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**zoo.hf_sizes(2), tie_word_embeddings=True))
    return annotate_modules(model, {"PP": zoo.paired(2, 2)})


@cache
def traced(name: str) -> Traced:
    found = case(name)
    return trace(found.model, found.loss, found.batch(ROWS, 0), ROWS, "fp64")


def captured(name: str, ways: int = 1) -> Captured:
    return _captured(name, ways)


@cache
def _captured(name: str, ways: int) -> Captured:
    chunks = traced(name).outline.chunks
    return differentiate(traced(name), {chunk.name: CodeOptions(ways=ways) for chunk in chunks})


def compare(name: str, backward: Backward, ways: int = 1) -> float:
    """The largest difference of loss, gradients and buffers between the chunks and plain autograd."""
    found = case(name)
    batch = found.batch(ROWS * ways, 1)
    whole = zoo.build(found, dtype=torch.float64)
    parts = zoo.build(found, dtype=torch.float64)
    return difference(captured(name, ways), found.loss, whole, parts, batch, backward, ways)


def difference(
    code: Captured,
    loss: zoo.Loss,
    whole: nn.Module,
    parts: nn.Module,
    batch: Mapping[str, Tensor],
    backward: Backward,
    ways: int = 1,
) -> float:
    """The same for two equal models: one run as a whole by autograd, one in chunks."""
    torch.manual_seed(7)
    result = loss(whole, batch)
    value = result[0] if isinstance(result, tuple) else result
    value.backward()
    torch.manual_seed(7)
    slices = [{key: field.chunk(ways)[rank] for key, field in batch.items()} for rank in range(ways)]
    machine = Machine(code, parts, slices)
    machine.step(backward, weight=1 / ways)
    got = machine.gradients()
    wanted = {key: param.grad for key, param in whole.named_parameters() if param.grad is not None}
    assert got.keys() == wanted.keys()
    pairs = [(got[key], wanted[key]) for key in got]
    pairs += [(machine.loss().mean(), value.detach())]
    if ways == 1:
        pairs += [(machine.devices[0].buffers[key], buffer) for key, buffer in whole.named_buffers()]
        if code.outline.weight:
            assert isinstance(result, tuple)
            pairs += [(machine.value(code.outline.weight), result[1])]
    return max(float((a - b).abs().max()) for a, b in pairs)


def check(
    model: Callable[[], nn.Module], loss: zoo.Loss, batch: Batch, precision: JobPrecision = "fp64"
) -> Captured:
    """Capture a model and hold it against autograd, bit for bit, in both kinds of backward."""
    rows = next(iter(batch.values())).shape[0]
    code = differentiate(trace(model, loss, batch, rows, precision))
    dtype = getattr(torch, DTYPES[precision])
    cast = {key: field.to(dtype) if field.is_floating_point() else field for key, field in batch.items()}

    def built() -> nn.Module:
        torch.manual_seed(0)
        return model().to(dtype)

    kinds: tuple[Backward, ...] = ("whole", "split")
    for backward in kinds:
        assert difference(code, loss, built(), built(), cast, backward) == 0.0
    return code
