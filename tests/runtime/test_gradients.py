"""Sums that the end of a step takes."""

import pytest
import torch

from piper.runtime.gradients import BLOCK, squares


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 3e-7), ("bfloat16", 2e-6)])
def test_squares_are_as_exact_as_single_precision(length: int, dtype: str, tolerance: float) -> None:
    flat = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    found = squares([flat])
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(flat.double().square().sum()), rel=tolerance)


def test_squares_of_several_parts_are_those_of_all() -> None:
    whole = torch.randn(6 * BLOCK, generator=torch.Generator().manual_seed(1))
    parts = [whole[:BLOCK].view(2, -1), whole[BLOCK : 3 * BLOCK + 5], whole[3 * BLOCK + 5 :]]
    assert float(squares(parts)) == pytest.approx(float(squares([whole])), rel=1e-6)
