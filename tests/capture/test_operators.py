"""Operations that compiled code does not take apart, or takes apart otherwise than Inductor."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.autodiff.joint import decompositions
from piper.capture.compile.operators import embedding_grad, silu, silu_grad, through_table

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_silu_and_its_gradient_are_those_of_torch(dtype: torch.dtype) -> None:
    x = torch.tensor([-200.0, -20.0, -1.0, -0.0, 0.5, 3.0, 200.0], dtype=dtype)
    grad = torch.linspace(-2, 2, 7, dtype=dtype)
    exact = torch.nn.functional.silu(x.double())
    exact_grad = torch.ops.aten.silu_backward(grad.double(), x.double())
    rounding = 2 * torch.finfo(dtype).eps
    for found, wanted in ((silu(x), exact), (silu_grad(grad, x), exact_grad)):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=1e-38)


def test_silu_is_computed_from_the_sigmoid_that_its_gradient_reads() -> None:
    def both(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.silu(x), torch.ops.aten.silu_backward(grad, x)

    traced = make_fx(both, decomposition_table=decompositions())(torch.randn(3), torch.randn(3))
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.aten.sigmoid.default) == 2
    assert not {torch.ops.aten.exp.default, torch.ops.aten.div.Tensor} & {*called}
