"""The expert operations against a plain loop over experts."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piper.errors import ConfigError
from piper.experts import grouped_mm, route, unroute


def by_expert(rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """What grouped_mm means, in plain autograd."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, w, strict=True)])


def region(x: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    rows, received = route(x, counts)
    hidden = torch.tanh(grouped_mm(rows, up, received))
    return unroute(grouped_mm(hidden, down, received, transpose=True), received, x.shape[0])


def plain_region(x: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    return by_expert(torch.tanh(by_expert(x, up, counts)), down.transpose(1, 2), counts)


def leaves(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(len(counts) + sum(counts))

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng).requires_grad_()

    return leaf(sum(counts), 3), leaf(len(counts), 3, 5), leaf(len(counts), 3, 5)


def value_and_grads(f: Callable[..., Tensor], *args: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    y = f(*args, counts)
    return y, *torch.autograd.grad(y.square().sum(), args)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_region_equals_a_loop_over_experts(counts: list[int]) -> None:
    sizes = torch.tensor(counts)
    ours = value_and_grads(region, *leaves(counts), counts=sizes)
    plain = value_and_grads(plain_region, *leaves(counts), counts=sizes)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5], [0, 0, 0], [4]])
def test_gradients_are_the_numeric_ones(counts: list[int]) -> None:
    sizes = torch.tensor(counts, dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x, up, down: region(x, up, down, sizes), leaves(counts))


def test_an_expert_without_rows_has_a_zero_gradient() -> None:
    x, up, down = leaves([2, 0, 1])
    region(x, up, down, torch.tensor([2, 0, 1])).sum().backward()
    assert up.grad is not None and down.grad is not None
    assert up.grad[1].count_nonzero() == 0 and down.grad[1].count_nonzero() == 0
    assert up.grad[0].count_nonzero() and up.grad[2].count_nonzero()


def test_only_the_gradients_asked_for_are_computed() -> None:
    x, up, _ = leaves([2, 1])
    grouped_mm(x, up.detach(), torch.tensor([2, 1])).sum().backward()
    assert x.grad is not None and up.grad is None


def test_route_and_unroute_change_nothing_on_one_device() -> None:
    x, counts = torch.randn(3, 2), torch.tensor([1, 2])
    rows, received = route(x, counts)
    assert torch.equal(rows, x) and torch.equal(received, counts)
    assert torch.equal(unroute(rows, received, 3), x)


def test_rows_and_experts_have_fresh_sizes_while_tracing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        rows, counts = route(torch.empty(6, 4), torch.empty(3, dtype=torch.int64))
        hidden = grouped_mm(rows, torch.empty(3, 4, 8), counts)
        back = unroute(hidden, counts, 6)
    assert [str(rows.shape[0]), str(counts.shape[0]), str(hidden.shape[0])] == ["u0", "u1", "u0"]
    assert (hidden.shape[1], tuple(back.shape)) == (8, (6, 8))


@pytest.mark.parametrize("operation", ["route", "unroute", "grouped_mm", "grouped_mm_weight"])
def test_operations_keep_the_rules_of_custom_operations(operation: str) -> None:
    x, up, _ = leaves([2, 0, 1])
    counts = torch.tensor([2, 0, 1])
    args = {
        "route": (x, counts),
        "unroute": (x, counts, 3),
        "grouped_mm": (x, up, counts, False),
        "grouped_mm_weight": (x.detach(), x.detach(), counts, 3),
    }[operation]
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.piper, operation), args, test_utils=utilities)


def test_weights_the_other_way_round_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        grouped_mm(torch.zeros(2, 3), torch.zeros(4, 5, 3), torch.tensor([2, 0, 0, 0]))
    assert str(error.value) == (
        "grouped_mm: rows and w do not fit together\n"
        "  rows: [2, 3] of torch.float32\n"
        "  w:    [4, 5, 3] of torch.float32\n"
        "  hint: give rows [n, d] and w [experts, d, f] of one type; transpose=True takes w as it is stored "
        "the other way round"
    )


def test_rows_and_weights_of_different_types_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        grouped_mm(torch.zeros(2, 3), torch.zeros(1, 3, 5, dtype=torch.float64), torch.tensor([2]))
    assert str(error.value) == (
        "grouped_mm: rows and w do not fit together\n"
        "  rows: [2, 3] of torch.float32\n"
        "  w:    [1, 3, 5] of torch.float64\n"
        "  hint: give rows [n, d] and w [experts, d, f] of one type; transpose=True takes w as it is stored "
        "the other way round"
    )


@pytest.mark.parametrize("counts", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)])
def test_counts_that_are_not_counts_are_refused(counts: Tensor) -> None:
    with pytest.raises(ConfigError) as error:
        route(torch.zeros(2, 3), counts)
    assert str(error.value) == (
        "route: these are not rows and a whole number for each expert\n"
        "  rows:   [2, 3] of torch.float32\n"
        f"  counts: {list(counts.shape)} of {counts.dtype}\n"
        "  hint:   rows lie along the first axis, [n, ...]; counts is [experts] of torch.int64 or torch.int32"
    )


def test_counts_of_other_rows_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        grouped_mm(torch.zeros(3, 2), torch.zeros(2, 2, 2), torch.tensor([2, 2]))
    assert str(error.value) == (
        "grouped_mm: counts does not describe these rows\n"
        "  counts: [2, 2]\n"
        "  hint:   pass the counts that route returned together with these rows: 2 that add up to 3"
    )


@pytest.mark.parametrize("counts", [[1, 1], [4, -1], [3]])
def test_counts_that_do_not_add_up_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="counts does not describe these rows"):
        grouped_mm(torch.zeros(3, 2), torch.zeros(2, 2, 2), torch.tensor(counts))


def test_rows_that_went_missing_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        unroute(torch.zeros(3, 2), torch.tensor([3]), 4)
    assert str(error.value) == (
        "unroute: these are not the rows that were routed\n"
        "  y:    [3, 2] of torch.float32\n"
        "  n:    4\n"
        "  hint: pass one row for each row that route returned, and n = the rows that went into route"
    )


def test_more_rows_than_were_routed_are_refused() -> None:
    with pytest.raises(ConfigError, match="these are not the rows that were routed"):
        unroute(torch.zeros(5, 2), torch.tensor([3]), 3)


def test_a_single_number_has_no_rows() -> None:
    with pytest.raises(ConfigError) as error:
        route(torch.tensor(1.0), torch.tensor([1]))
    assert str(error.value) == (
        "route: these are not rows and a whole number for each expert\n"
        "  rows:   [] of torch.float32\n"
        "  counts: [1] of torch.int64\n"
        "  hint:   rows lie along the first axis, [n, ...]; counts is [experts] of torch.int64 or torch.int32"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("width", [16, 24, 20])  # 20: rows that are not aligned, so the loop runs
@pytest.mark.parametrize("counts", [[5, 0, 9, 2], [0, 0, 0, 7], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_the_grouped_kernel_equals_the_loop(counts: list[int], width: int, transpose: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 32, generator=rng)
    w = torch.randn(len(counts), *((width, 32) if transpose else (32, width)), generator=rng)
    results = []
    for dtype, device in ((torch.bfloat16, "cuda"), (torch.float64, "cpu")):
        rows, weight = (t.bfloat16().to(device, dtype).requires_grad_() for t in (x, w))
        y = grouped_mm(rows, weight, torch.tensor(counts, device=device), transpose)
        grads = torch.autograd.grad(y.sum(), (rows, weight))
        results.append([t.detach().cpu().double() for t in (y, *grads)])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, rtol=2e-2, atol=2e-1)
