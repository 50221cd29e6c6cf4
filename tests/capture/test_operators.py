"""Operations that compiled code does not take apart."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.joint import decompositions
from piper.capture.operators import SPARSE, embedding_grad

aten = torch.ops.aten.embedding_dense_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_table_is_what_eager_gives(dtype: torch.dtype) -> None:
    rows, grad = torch.tensor([[3, 0, 3], [7, 7, 7]]), torch.randn(2, 3, 5).to(dtype)
    for padding, by_count in ((-1, False), (3, False), (-1, True)):
        found = embedding_grad(grad, rows, 9, padding, by_count)
        assert found.dtype is dtype
        torch.testing.assert_close(found, aten(grad, rows, 9, padding, by_count), rtol=0, atol=0)


def test_its_stand_in_has_its_shape() -> None:
    torch.library.opcheck(
        embedding_grad, (torch.randn(2, 3, 5), torch.tensor([[3, 0, 3], [7, 7, 7]]), 9, -1, False)
    )


@pytest.mark.parametrize("length", [SPARSE * 6, SPARSE * 6 - 1])
def test_a_table_is_taken_apart_unless_it_is_mostly_zeros(length: int) -> None:
    def gradient(grad: Tensor, rows: Tensor) -> Tensor:
        found: Tensor = aten(grad, rows, length, -1, False)
        return found

    rows, grad = torch.tensor([[3, 0, 3], [7, 7, 7]]), torch.randn(2, 3, 5)
    traced = make_fx(gradient, decomposition_table=decompositions())(grad, rows)
    whole = any("embedding_grad" in str(node.target) for node in traced.graph.nodes)
    assert whole == (length >= SPARSE * 6)
    torch.testing.assert_close(traced(grad, rows), gradient(grad, rows))
