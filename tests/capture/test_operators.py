"""Operations that compiled code does not take apart."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.autodiff.joint import decompositions
from piper.capture.compile.operators import embedding_grad, through_table

aten = torch.ops.aten.embedding_dense_backward.default
ROWS = torch.tensor([[3, 0, 3], [7, 7, 7]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_table_is_what_eager_gives(dtype: torch.dtype) -> None:
    grad = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for padding, by_count in ((-1, False), (3, False), (-1, True)):
        found = embedding_grad(grad, ROWS, 9, padding, by_count)
        assert found.dtype is dtype
        torch.testing.assert_close(found, aten(grad, ROWS, 9, padding, by_count), rtol=0, atol=0)


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_through_a_table_it_is_the_same_to_a_rounding(dtype: torch.dtype, padding: int) -> None:
    grad = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = through_table(grad, ROWS, 9, padding)
    exact = aten(grad.double(), ROWS, 9, padding, False)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_its_stand_in_has_its_shape() -> None:
    torch.library.opcheck(embedding_grad, (torch.randn(2, 3, 5), ROWS, 9, -1, False))


def test_a_traced_gradient_stays_whole() -> None:
    def gradient(grad: Tensor, rows: Tensor) -> Tensor:
        found: Tensor = aten(grad, rows, 9, -1, False)
        return found

    grad = torch.randn(2, 3, 5)
    traced = make_fx(gradient, decomposition_table=decompositions())(grad, ROWS)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert called == ["piper.embedding_grad.default"]
    torch.testing.assert_close(traced(grad, ROWS), gradient(grad, ROWS), rtol=0, atol=0)
