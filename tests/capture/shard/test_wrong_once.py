"""Sharded operations that once gave wrong numbers or a raw error: each is equal now, or refused with a reason."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.errors import CaptureError
from piper.ir.sharding import Shard
from tests.capture.shard.test_rules import Batch, Net, X, compare, divided, numbers, tokens

PENDING: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda y: y * y,
    "ratio": lambda y: y / y,
    "root mean square": lambda y: y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6),
    "doubled": lambda y: y + y,
    "less itself": lambda y: y - y,
    "scaled": lambda y: 3 * y / 2,
    "shifted": lambda y: y + 1,
    "from a number": lambda y: 1 - y,
    "rounded": lambda y: y * y.to(torch.int64),
    "as truth": lambda y: y * y.to(torch.bool),
    "as a narrower number": lambda y: y.to(torch.float32).to(torch.float64) * 0 + y,
    "largest": lambda y: y.amax(-1),
}


@pytest.mark.parametrize("name", PENDING)
def test_work_on_a_pending_sum(name: str) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        y = F.linear(F.linear(batch["x"] / 4, net.w), net.v)
        return (PENDING[name](y) * 1.5).sin().sum()

    shapes = {"w": (16, 8), "v": (8, 16)}
    compare(call, shapes, X, {"w": Shard(0), "v": Shard(1)}, degree=4)


@pytest.mark.parametrize("dims", [(-1,), (0, -1), ()])
@pytest.mark.parametrize("keep", [False, True])
def test_a_maximum_over_a_sharded_dimension_has_a_gradient(dims: tuple[int, ...], keep: bool) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        h = F.linear(batch["x"], net.w)
        h = h - (h - 1).detach().relu()  # so that several elements are the largest
        return (h.amax(dims, keep) + h).pow(2).sum() if keep else h.amax(dims).pow(2).sum()

    compare(call, {"w": (16, 8)}, X, {"w": Shard(0)}, degree=4)


def test_a_gated_product_is_sharded_half_by_half() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.linear(F.glu(F.linear(batch["x"], net.w, net.b)), net.v).pow(2).mean()

    weights = {"w": Shard(0), "v": Shard(1)}
    shapes = {"w": (16, 8), "b": (16,), "v": (8, 8)}
    assert divided(call, shapes, X, weights).sharding.weights["w"] == Shard(0, 2)
    compare(call, shapes, X, weights)


def test_a_gate_along_another_dimension() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.glu(F.linear(batch["x"], net.w), 1).pow(2).mean()

    compare(call, {"w": (16, 8)}, X, {"w": Shard(0)}, degree=4)


def test_a_gate_whose_halves_lie_on_different_devices_is_refused() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.glu(F.linear(batch["x"], net.w).unflatten(-1, (4, 4)), -2).pow(2).mean()

    with pytest.raises(CaptureError, match=r"aten\.glu.* its two halves lie on different devices"):
        divided(call, {"w": (16, 8)}, X, {"w": Shard(0)})


@pytest.mark.parametrize("stacked", [False, True])
def test_a_table_sharded_by_rows_joined_with_another_value(stacked: bool) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        found = F.embedding(batch["t"], net.table)
        other = found * 0 + net.other
        return (
            torch.stack([found, other], 1).sin().sum() if stacked else torch.cat([found, other]).sin().sum()
        )

    compare(call, {"table": (8, 4), "other": (4,)}, {"t": tokens(3, 5)}, {"table": Shard(0)})


@pytest.mark.parametrize("held", [Shard(0), Shard(1), None])
def test_gradients_scaled_by_how_often_an_index_occurs(held: Shard | None) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.embedding(batch["t"], net.table, scale_grad_by_freq=True).pow(2).sum()

    weights = {"table": held} if held else {}
    if held == Shard(0):
        with pytest.raises(CaptureError, match="how often an index occurs"):
            divided(call, {"table": (8, 4)}, {"t": tokens(3, 6)}, weights)
        return
    fields = {} if held else {"t": Shard(1)}
    compare(call, {"table": (8, 4)}, {"t": tokens(3, 6)}, weights, fields)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sharded_labels_over_a_sharded_vocabulary(reduction: str) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        logits = F.linear(batch["x"], net.head).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction).sum()

    batch = {"x": numbers(2, 8, 8), "labels": tokens(2, 8)}
    compare(call, {"head": (8, 8)}, batch, {"head": Shard(0)}, {"labels": Shard(1)})


def test_a_parameter_that_sharded_work_and_whole_work_read() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        found = (
            F.embedding(batch["t"], net.table, scale_grad_by_freq=True).pow(2).sum()
        )  # of gathered indices
        normed = F.rms_norm(F.linear(F.linear(batch["x"], net.w), net.v), (8,), net.scale)  # of a sum
        mine = F.linear(batch["x"] * net.scale, net.w).sin()
        return found + normed.pow(2).sum() + mine.sum() + (batch["z"] * net.table).pow(2).sum()

    shapes = {"table": (8, 6), "w": (16, 8), "v": (8, 16), "scale": (8,)}
    batch = {"t": tokens(3, 6), "z": numbers(2, 4, 8, 6), **X}
    compare(call, shapes, batch, {"w": Shard(0), "v": Shard(1)}, {"t": Shard(1), "z": Shard(1)})
