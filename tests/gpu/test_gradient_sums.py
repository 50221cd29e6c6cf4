"""On a GPU products of bf16 are added to float32 sums of gradients without being rounded first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from piper.capture.compile.operators import mm_into
from piper.compiler import compile
from tests.runtime.test_gradient_sums import (
    AT_MOST,
    error,
    exact_gradients,
    gradients_of,
    job,
    plain_gradients,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@pytest.mark.parametrize("add", [False, True])
def test_a_product_is_added_to_a_sum_in_float32(add: bool) -> None:
    torch.manual_seed(0)
    left, right = (torch.randn(4, 33, width, device="cuda", dtype=torch.bfloat16) for width in (48, 64))
    out = torch.randn(48, 64, device="cuda")
    exact = left.double().flatten(0, 1).t() @ right.double().flatten(0, 1) + (out.double() if add else 0)
    mm_into(left, right, out, torch.tensor(add))
    off = (out.double() - exact).abs().max() / exact.abs().max()
    assert off < 1e-6, off  # a product that was rounded to bf16 is 1e-3 off


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_64_microbatches_are_as_exact_as_plain_sums_in_float32(
    zero: int, compiled: bool, tmp_path: Path
) -> None:
    asked = replace(job(64, zero=zero, stages=2), initial="host")  # the values that plain PyTorch begins with
    program = compile(asked, device="cuda", compile=compiled, cache=tmp_path)
    batch = next(iter(asked.data()))
    exact = exact_gradients(asked, batch)
    usual = error(plain_gradients(asked, batch, len(batch["x"])), exact)
    found = error({name: value.cpu() for name, value in gradients_of(program).items()}, exact)
    assert found <= AT_MOST * usual, (found, usual)
