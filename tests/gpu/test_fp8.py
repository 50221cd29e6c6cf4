"""Products in fp8 on tensor cores: those of the emulation, whatever the sizes, compiled or not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.capture.precision.fp8 import CAPABLE, fp8_linear
from piper.compiler import compile
from piper.plan.bucket import runs_of_rows
from piper.plan.updates import Piece
from piper.run.launch import launch_inline
from piper.runtime.fp8_gathers import E4M3, LARGEST, LEAST, RowsByOperations
from piper.runtime.worker import Options
from tests.plan.test_weight_rows import TWO
from tests.runtime.test_fp8 import FP8, GATHERED, checked, data, job, pairs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # each kernel is compiled
Pair = tuple[Tensor, Tensor]
ROUNDING = 2**-8  # of the largest result: results are bf16
# A quotient halfway between two numbers of fp8 may fall to the other side, since hosts and GPUs divide
# differently: of the norm of all results, where rounding itself moves about 0.04.
FLIPPED = 2**-5
SIZES = [(64, 128, 96), (64, 128, 90), (50, 128, 96)]


@pytest.fixture(autouse=True)
def capable() -> None:
    if torch.cuda.get_device_capability() < CAPABLE:
        pytest.skip("this GPU has no fp8")


def products(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """The forward and both gradients, in float64 on the host."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = fp8_linear(x, weight)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return [each.detach().double().cpu() for each in (y, x.grad, weight.grad)]


def exact(shape: tuple[int, int], draw: torch.Generator) -> Tensor:
    """Numbers that fp8 holds as they are under every scale: the largest of each row is 1.75."""
    halves = torch.tensor([1.0, 1.25, 1.5, 1.75, 0.5, 0.625, 0.75, 0.875])
    drawn = halves[torch.randint(len(halves), shape, generator=draw)]
    signs = torch.randint(2, shape, generator=draw) * 2 - 1
    drawn[:, 0] = 1.75
    return (drawn * signs).bfloat16()


def pairs_of(sizes: tuple[int, int, int], values: Callable[..., Tensor]) -> list[Pair]:
    """The products on tensor cores, each with that of the emulation."""
    draw = torch.Generator().manual_seed(0)
    tokens, inner, outer = sizes
    x, weight, grad = (values(shape, draw) for shape in ((tokens, inner), (outer, inner), (tokens, outer)))
    found = products(x.cuda(), weight.cuda(), grad.cuda())
    return [*zip(found, products(x, weight, grad), strict=True)]


@pytest.mark.parametrize("sizes", SIZES)
def test_tensor_cores_give_what_the_emulation_gives(sizes: tuple[int, int, int]) -> None:
    for got, wanted in pairs_of(sizes, exact):
        assert (got - wanted).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.mark.parametrize("sizes", SIZES)
def test_tensor_cores_round_as_the_emulation_does(sizes: tuple[int, int, int]) -> None:
    def normal(shape: tuple[int, int], draw: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    for got, wanted in pairs_of(sizes, normal):
        assert (got - wanted).norm() <= FLIPPED * wanted.norm()


@pytest.mark.parametrize("width", [64, 5000, 4096])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (37, -11)])
def test_kernels_round_rows_as_operations_do(width: int, start: int, stop: int | None) -> None:
    from piper.runtime.cuda.fp8_rows import RowsByKernels

    shapes = ((7, width), (3, 48))
    offsets = (0, 7 * width)
    pieces = tuple(
        Piece(name=f"{offset}", shape=shape, offset=offset)
        for shape, offset in zip(shapes, offsets, strict=True)
    )
    bucket = replace(TWO, pieces=pieces)
    end = bucket.numel + (stop or 0)
    runs = [*runs_of_rows(bucket, start, end)]
    values = torch.randn(end - start, device="cuda").bfloat16()
    values[: runs[0].stop - start] = 0  # a row of zeros has a scale too
    found = []
    plain = RowsByOperations(runs, start)
    for rows in (RowsByKernels(runs, start, values.device, smallest=LEAST, largest=LARGEST), plain):
        peaks, narrow, wide = (
            torch.zeros(10, device="cuda"),
            torch.zeros(len(values), dtype=E4M3, device="cuda"),
            torch.zeros_like(values),
        )
        rows.find_peaks(values, peaks)
        rows.narrow(values, peaks, narrow)
        rows.widen(narrow, peaks, wide)
        found.append((peaks, narrow.view(torch.uint8), wide))
    for ours, wanted in zip(*found, strict=True):
        assert torch.equal(ours, wanted)
    assert (found[0][2] - values).abs().max() <= 2**-4 * values.abs().max()


def test_gathers_in_fp8_have_the_numbers_of_one_device() -> None:
    assert checked(compile(job(*pairs(3), GATHERED), device="cuda")).ok


@pytest.mark.parametrize("compiled", [False, True])
def test_a_composed_layout_has_the_numbers_of_one_device(compiled: bool, tmp_path: Path) -> None:
    program = compile(job(*pairs(3), FP8), device="cuda", compile=compiled, cache=tmp_path)
    assert checked(program).ok


def test_a_compiled_job_in_bf16_has_the_gradients_of_the_emulation(tmp_path: Path) -> None:
    losses, gradients = [], []
    for device in ("cuda", "cpu"):
        asked = replace(job(FP8, precision="bf16"), initial="host")  # the same values for both
        program = compile(asked, device=device, compile=device == "cuda", cache=tmp_path)
        with launch_inline(program, Options(keep_gradients=True)) as run:
            losses.append(run.step(data()[0]).loss)
            gradients.append({name: value.double().cpu() for name, value in run.gradients().items()})
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[1].items():
        assert wanted.norm() > 0
        # Rounding moves them by as much: on a host, those of bf16 are up to 0.5 from those of float64.
        assert (gradients[0][name] - wanted).norm() <= 0.6 * wanted.norm(), name
