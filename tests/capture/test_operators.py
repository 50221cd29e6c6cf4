"""Operations that compiled code does not take apart, or takes apart otherwise than Inductor."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper.capture.autodiff.joint import decompositions
from piper.capture.compile.flat_gradients import write_in_place
from piper.capture.compile.operators import (
    embedding_grad,
    embedding_grad_into,
    silu,
    silu_grad,
    through_table,
)

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


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_of_a_table_is_added_to_a_sum(dtype: torch.dtype, padding: int) -> None:
    grad = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = aten(grad.double(), ROWS, 9, padding, False)
    total = torch.full((9, 5), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    for times in (1, 2):
        embedding_grad_into(grad, ROWS, total, torch.tensor(times > 1), padding)
        torch.testing.assert_close(total.double(), times * exact, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_table_is_written_into_given_memory() -> None:
    def table(grad: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.aten.embedding_dense_backward(grad, rows, 9, 3, False),)

    grad = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    traced = make_fx(table, decomposition_table=decompositions(), tracing_mode="fake")(grad, ROWS)
    written, out = write_in_place(traced, [0]), torch.full((9, 5), torch.nan, dtype=torch.float64)
    assert written(grad, ROWS, out, torch.tensor(False)) == ()
    torch.testing.assert_close(out, aten(grad, ROWS, 9, 3, False))


def test_silu_is_computed_from_the_sigmoid_that_its_gradient_reads() -> None:
    def both(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.silu(x), torch.ops.aten.silu_backward(grad, x)

    traced = make_fx(both, decomposition_table=decompositions())(torch.randn(3), torch.randn(3))
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.aten.sigmoid.default) == 2
    assert not {torch.ops.aten.exp.default, torch.ops.aten.div.Tensor} & {*called}


def test_products_are_written_whatever_their_factors_are_views_of() -> None:
    def products(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        rows = torch.sigmoid(x)  # [2, 4, 4]
        flat, weighed = rows.reshape(8, 4), grad.reshape(8, 3)
        return (
            weighed.t() @ flat,  # of a linear layer
            flat[:3] @ rows[0],  # no factor is transposed
            rows[0].t() @ rows.reshape(4, 8),  # the view does not keep rows
            rows.transpose(0, 1).reshape(8, 4).t() @ weighed,  # nor does this one, which is copied
        )

    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(2, 4, width, generator=generator, dtype=torch.float64) for width in (4, 3)]
    wanted = products(*given)
    traced = make_fx(products, decomposition_table=decompositions(), tracing_mode="fake")(*given)
    written = write_in_place(traced, range(4))
    called = [node for node in written.graph.nodes if node.target is torch.ops.piper.mm_into.default]
    assert len(called) == 4 and not written.graph.find_nodes(
        op="call_function", target=torch.ops.aten.mm.default
    )
    assert [str(factor) for factor in called[0].args[:2]] == ["grad_1", "sigmoid"], "views are computed again"
    targets = [torch.zeros_like(each) for each in wanted]
    for times in (1, 2):
        assert written(*given, *targets, torch.tensor(times > 1)) == ()
        for found, each in zip(targets, wanted, strict=True):
            torch.testing.assert_close(found, times * each, rtol=1e-14, atol=1e-14)
