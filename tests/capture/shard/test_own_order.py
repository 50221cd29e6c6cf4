"""Rows that each device sorts by itself, as routers do: equal to one device, or refused where places matter."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.ir.sharding import Placement, Shard
from tests.capture.shard.test_rules import Batch, Net, X, compare, divided
from tests.capture.shard.verdict import Sample, Verdict, judge, recorded

LAYOUTS = [Shard(1), Shard(1, zigzag=True), Shard(0)]


def chosen(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of [4, 12, 6] and the experts that each chooses: [48, 6] and [48, 2]."""
    tokens = y.flatten(0, 1)
    return tokens, tokens.detach().topk(2, dim=-1).indices


def pairs(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = chosen(y)
    return tokens, experts.flatten(), experts.flatten().argsort(stable=True)


def by_argsort(y: Tensor) -> Tensor:
    tokens, _, order = pairs(y)
    return tokens[order // 2].sin()[order.argsort()].view(48, 2, 6).sum(1)


def by_scatter(y: Tensor) -> Tensor:
    tokens, _, order = pairs(y)
    back = torch.empty_like(order).scatter(0, order, torch.arange(96))
    return tokens[order // 2].sin()[back].view(4, 12, 2, 6)


def by_sort(y: Tensor) -> Tensor:
    tokens, experts, _ = pairs(y)
    sorted_experts, order = experts.sort(stable=True)
    rows = tokens.index_select(0, torch.div(order, 2, rounding_mode="floor")) * sorted_experts[:, None]
    return rows[order.argsort()] * (1 + sorted_experts).sum()


def by_writing(y: Tensor) -> Tensor:
    tokens, _, order = pairs(y)
    rows = tokens[order // 2] * (1 + order.remainder(2))[:, None]
    back = torch.empty_like(rows)
    back[order] = rows
    return back


def by_adding(y: Tensor) -> Tensor:
    tokens, _, order = pairs(y)
    rows = (tokens[order // 2] ** 2).softmax(-1)
    return torch.zeros(48, 6, dtype=y.dtype).index_add(0, order // 2, rows)


def counted(y: Tensor) -> Tensor:
    tokens, experts, order = pairs(y)
    counts = torch.ones(6, dtype=torch.int64).scatter_add(0, experts, torch.ones_like(experts))
    again = torch.zeros(6, dtype=torch.int64).index_add(0, experts[order], torch.ones_like(order))
    return counts.double() / (1 + again) + tokens.softmax(-1).mean(0)


def statistics(y: Tensor) -> Tensor:
    tokens, _, order = pairs(y)
    rows = tokens[order // 2]
    return rows.mean(0) + rows.amax(0) + rows.sum()


EQUAL: list[Callable[[Tensor], Tensor]] = [
    by_argsort,
    by_scatter,
    by_sort,
    by_writing,
    by_adding,
    counted,
    statistics,
]
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "the order itself": lambda y: pairs(y)[2],
    "the next row": lambda y: pairs(y)[0][(pairs(y)[2] + 1) % 48],
    "the first rows": lambda y: pairs(y)[0][pairs(y)[2] // 2][:10],
    "a running sum": lambda y: pairs(y)[0][pairs(y)[2] // 2].cumsum(0),
    "rows and places": lambda y: pairs(y)[0][pairs(y)[2] // 2] * torch.arange(96.0)[:, None],
    "sorted beside unsorted": lambda y: pairs(y)[0][pairs(y)[2] // 2] + pairs(y)[0].repeat_interleave(2, 0),
    "two orders": lambda y: y.flatten()[y.flatten().argsort()] + y.flatten()[y.sin().flatten().argsort()],
    "runs that devices share": lambda y: pairs(y)[0].repeat(2, 1)[pairs(y)[2] // 32 * 2],
    "joined": lambda y: torch.cat([pairs(y)[0][pairs(y)[2] // 2]] * 2),
    "several rows in one": lambda y: pairs(y)[0][pairs(y)[2] // 2].view(48, 12),
    "drawn": lambda y: torch.nn.functional.dropout(pairs(y)[0][pairs(y)[2] // 2], 0.5),
    "numbers as values": lambda y: pairs(y)[2].double().sum(),
}


def verdict(call: Callable[[Tensor], Tensor], layout: Placement) -> Verdict:
    y = torch.randn(4, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    sample = Sample(name="", call=lambda x: [call(x)], tensors=(y.requires_grad_(),))
    return judge(sample, recorded(sample), [layout], 2)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("call", EQUAL, ids=lambda call: call.__name__)
def test_rows_that_return_to_their_places(call: Callable[[Tensor], Tensor], layout: Placement) -> None:
    assert verdict(call, layout) == Verdict(kind="equal")


@pytest.mark.parametrize("name", REFUSED)
def test_places_in_an_order_that_differs(name: str) -> None:
    found = verdict(REFUSED[name], Shard(1))
    assert found.kind == "refused", found


def test_a_router_that_looks_at_places_gathers_the_rows_of_activations_between_regions() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        tokens = F.linear(F.linear(batch["x"], net.w), net.v).sin().flatten(0, 1)
        order = tokens[:, 0].argsort(stable=True)
        weights = torch.zeros(4, dtype=tokens.dtype).scatter_add(0, order % 4, tokens[:, 1])
        return (tokens[order].cumsum(0) * tokens).sum() + weights.square().sum()

    shapes, weights = {"w": (16, 8), "v": (8, 16)}, {"w": Shard(0), "v": Shard(1)}
    assert divided(call, shapes, X, weights, between=1).sharding.gathers_rows
    compare(call, shapes, X, weights, between=1)
