"""Products in fp8 on tensor cores: those of the emulation, whatever the sizes, compiled or not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import piper
from piper.capture.fp8 import CAPABLE, fp8_linear
from piper.compiler import compile
from tests.runtime.test_fp8 import FP8, checked, data, job, pairs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # each kernel is compiled
ROUNDING = 2**-8  # of the largest result: results are bf16
# A quotient halfway between two numbers of fp8 may fall to the other side: hosts and GPUs divide differently.
FEW, FLIPPED = 0.01, 2**-4


@pytest.fixture(autouse=True)
def capable() -> None:
    if torch.cuda.get_device_capability() < CAPABLE:
        pytest.skip("this GPU has no fp8")


def products(
    x: Tensor, weight: Tensor, grad: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = fp8_linear
) -> list[Tensor]:
    """The forward and both gradients, in float64 on the host."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = multiply(x, weight)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return [each.detach().double().cpu() for each in (y, x.grad, weight.grad)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "inner", "outer"), [(64, 128, 96), (64, 128, 90), (50, 128, 96)])
def test_tensor_cores_give_what_the_emulation_gives(
    tokens: int, inner: int, outer: int, compiled: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((tokens, inner), (outer, inner), (tokens, outer))
    x, weight, grad = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    multiply = torch.compile(fp8_linear) if compiled else fp8_linear
    found = products(x.cuda(), weight.cuda(), grad.cuda(), multiply)
    for got, wanted in zip(found, products(x, weight, grad), strict=True):
        off = (got - wanted).abs() / wanted.abs().max()
        assert (off > ROUNDING).double().mean() <= FEW
        assert off.max() <= FLIPPED


@pytest.mark.parametrize("compiled", [False, True])
def test_a_composed_layout_has_the_numbers_of_one_device(compiled: bool, tmp_path: Path) -> None:
    program = compile(job(*pairs(3), FP8), device="cuda", compile=compiled, cache=tmp_path)
    assert checked(program).ok


def test_a_compiled_job_in_bf16_trains_like_the_emulation(tmp_path: Path) -> None:
    found = []
    for device in ("cuda", "cpu"):
        asked = job(FP8, precision="bf16")
        program = compile(asked, device=device, compile=device == "cuda", cache=tmp_path)
        with piper.launch(program, on="inline") as run:
            found.append([run.step(data()[0]).loss for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel=0.02)
