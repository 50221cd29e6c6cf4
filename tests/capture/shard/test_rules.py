"""Each rule by itself: divide, run on every device, join, and compare with the undivided operation."""

from collections.abc import Callable, Mapping
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.shard.aten import as_aten
from piper.capture.shard.axis_sharding import AxisSharding
from piper.capture.shard.layout import reshaped
from piper.capture.shard.request import regions_of, shard_forward
from piper.capture.shard.sharder import Sharder
from piper.capture.trace.build_model import build_fake
from piper.capture.trace.record import record
from piper.errors import CaptureError
from piper.ir.sharding import Shard
from tests.capture.shard import lockstep
from tests.capture.shard.verdict import request_of

Batch = Mapping[str, Tensor]


class Net(nn.Module):
    """Parameters of given shapes, and nothing else."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            value = torch.empty(shape)
            if not hasattr(value, "fake_mode"):
                value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value))

    def __getattr__(self, name: str) -> Tensor:
        found = super().__getattr__(name)
        assert isinstance(found, Tensor)
        return found


Call = Callable[[Net, Batch], Tensor]


def divided(
    call: Call,
    shapes: Mapping[str, tuple[int, ...]],
    batch: Batch,
    weights: Mapping[str, Shard],
    fields: Mapping[str, Shard] | None = None,
    between: int | None = None,
    degree: int = 2,
    attention: str = "gather",
    zigzag: bool = False,
) -> Sharder:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    model = build_fake(lambda: Net(shapes), mode, torch.float64, torch.device("cpu"))
    with mode:
        fakes = {
            name: torch.empty(value.shape, dtype=torch.float64 if value.is_floating_point() else value.dtype)
            for name, value in batch.items()
        }
    request = request_of(degree, between, attention, zigzag)
    sharding = AxisSharding(request=request, weights=weights, batch=fields or {})
    recording = as_aten(record(model, lambda net, given: call(cast(Net, net), given), fakes))
    return shard_forward(recording, sharding, regions_of(recording))


def compare(
    call: Call,
    shapes: Mapping[str, tuple[int, ...]],
    batch: Batch,
    weights: Mapping[str, Shard],
    fields: Mapping[str, Shard] | None = None,
    degree: int = 2,
    undivided: Call | None = None,
    **how: object,
) -> dict[str, int]:
    """Return how often each collective ran, once losses and gradients are those of the undivided call.

    undivided: another way to write that call.
    """
    made = divided(call, shapes, batch, weights, fields, degree=degree, **how)  # type: ignore[arg-type]
    weights = made.sharding.weights
    model = Net(shapes).double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    wanted = (undivided or call)(model, batch)
    wanted.backward()
    params: list[dict[str, Tensor]] = [{} for _ in range(degree)]
    given: list[dict[str, Tensor]] = [{} for _ in range(degree)]
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        held = weights.get(name)
        parts = lockstep.cut(value, held, degree) if held else [value.clone() for _ in range(degree)]
        for i, part in enumerate(parts):
            params[i][name] = part.requires_grad_()
    for name, value in batch.items():
        held = (fields or {}).get(name)
        parts = lockstep.cut(value, held, degree) if held else [value] * degree
        for i, part in enumerate(parts):
            given[i][name] = part
    losses, ran = lockstep.run(made.recorded(), degree, params, {}, given)
    torch.autograd.backward(losses)
    for loss in losses:
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        grads = [p[name].grad for p in params]
        assert parameter.grad is not None and all(grad is not None for grad in grads), name
        found = [grad for grad in grads if grad is not None]
        if name in weights:
            got = lockstep.join(found, weights[name])
        elif name in made.summed:
            got = sum(found[1:], found[0])
        else:
            got = found[0]
            assert all(torch.equal(grad, got) for grad in found), f"{name} differs between devices"
        torch.testing.assert_close(got, parameter.grad, rtol=1e-11, atol=1e-12)
    return {name: count for name, count in ran.items() if count}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def tokens(*shape: int, classes: int = 8) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(5))


X = {"x": numbers(2, 4, 8)}


def test_outputs_of_a_product_are_divided_without_a_collective_but_for_the_gradient_of_its_input() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        h = F.linear(batch["x"] * net.scale, net.w, net.b)
        return F.linear(F.gelu(h), net.v, net.c).pow(2).mean()

    shapes = {"scale": (8,), "w": (16, 8), "b": (16,), "v": (8, 16), "c": (8,)}
    ran = compare(call, shapes, X, {"w": Shard(0), "b": Shard(0), "v": Shard(1)})
    assert ran == {"none": 1, "back all_reduce": 1, "all_reduce": 1, "back none": 1}


def test_between_keeps_activations_divided() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        h = batch["x"] * net.scale
        for w, v in ((net.w0, net.v0), (net.w1, net.v1)):
            h = h + F.linear(F.silu(F.linear(F.rms_norm(h, (8,), net.scale), w)), v)
        return h.sum()

    shapes = {"scale": (8,), "w0": (16, 8), "v0": (8, 16), "w1": (16, 8), "v1": (8, 16)}
    weights = {"w0": Shard(0), "w1": Shard(0), "v0": Shard(1), "v1": Shard(1)}
    ran = compare(call, shapes, X, weights, between=1)
    # the first layer reads a whole input; its sum is scattered, and so is everything after it
    assert ran["reduce_scatter"] == 2 and ran["back all_gather"] == 3
    assert ran["all_gather"] == 1 and ran["back reduce_scatter"] == 1
    assert ran["all_reduce"] == 1  # the loss


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("divide_by", ["vocabulary", "rows", "rows zigzag"])
def test_cross_entropy_never_gathers_the_logits(degree: int, reduction: str, divide_by: str) -> None:
    labels = tokens(2, 8)
    labels[0, :5] = -100

    def call(net: Net, batch: Batch) -> Tensor:
        logits = F.linear(batch["x"], net.head)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)

    batch = {"x": numbers(2, 8, 8), "labels": labels}
    if divide_by == "vocabulary":
        ran = compare(call, {"head": (8, 8)}, batch, {"head": Shard(0)}, degree=degree)
        assert ran == {"max": 1, "all_reduce": 2, "back none": 2}
    else:
        zigzag = divide_by == "rows zigzag"
        by = Shard(1, zigzag=zigzag)
        if zigzag and degree == 4:
            by = Shard(1, zigzag=True)
        ran = compare(
            call, {"head": (8, 8)}, batch, {}, {"x": by, "labels": by}, degree=degree, zigzag=zigzag
        )
        assert set(ran) <= {"all_reduce", "back none"}


def test_a_table_divided_by_rows_gives_a_sum_and_leaves_its_padding_row_without_a_gradient() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.embedding(batch["t"], net.table, padding_idx=3).pow(2).sum()

    ran = compare(call, {"table": (8, 4)}, {"t": tokens(3, 5)}, {"table": Shard(0)})
    assert ran == {"all_reduce": 1, "back none": 1}


def test_a_table_divided_by_columns_needs_no_collective_to_look_up() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return F.embedding(batch["t"], net.table).pow(2).sum()

    assert compare(call, {"table": (8, 4)}, {"t": tokens(3, 5)}, {"table": Shard(1)}) == {
        "all_reduce": 1,
        "back none": 1,
    }


@pytest.mark.parametrize("how", ["heads of weights", "gather", "zigzag", "heads"])
def test_attention(how: str) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        q, k, v = (
            F.linear(batch["x"], w).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (net.q, net.k, net.v)
        )
        k, v = (
            t[:, :, None].expand(*t.shape[:2], 2, *t.shape[2:]).reshape(t.shape[0], -1, *t.shape[2:])
            for t in (k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(out.transpose(1, 2).flatten(2), net.o).pow(2).mean()

    shapes = {"q": (16, 8), "k": (8, 8), "v": (8, 8), "o": (8, 16)}
    batch = {"x": numbers(2, 8, 8)}
    if how == "heads of weights":
        weights = {"q": Shard(0), "k": Shard(0), "v": Shard(0), "o": Shard(1)}
        assert compare(call, shapes, batch, weights) == {"all_reduce": 1, "back none": 1}
        return
    zigzag = how == "zigzag"
    by = {"x": Shard(1, zigzag=zigzag)}
    ran = compare(
        call, shapes, batch, {}, by, attention="heads" if how == "heads" else "gather", zigzag=zigzag
    )
    if how == "heads":
        assert ran["all_to_all"] == ran["back all_to_all"] == 4
    else:  # keys and values before they are repeated
        assert ran["all_gather"] == ran["back reduce_scatter"] == 2


@pytest.mark.parametrize(
    ("kind", "zigzag", "degree"),
    [
        ("causal", False, 2),
        ("causal", True, 4),
        ("full", True, 2),
        ("masked", False, 4),
        ("window", True, 2),
        ("window", False, 4),
    ],
)
def test_a_ring_passes_keys_and_values_on(kind: str, zigzag: bool, degree: int) -> None:
    """Each goes to the next device once less often than there are devices; nothing is gathered."""

    def call(net: Net, batch: Batch) -> Tensor:
        q, k, v = (
            F.linear(batch["x"], w).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (net.q, net.k, net.v)
        )
        places = torch.arange(8, device=q.device)
        mask = places[:, None] >= places[None, :]
        if kind == "window":
            mask = mask & (places[:, None] - places[None, :] < 3)
        k, v = (
            t[:, :, None].expand(*t.shape[:2], 2, *t.shape[2:]).reshape(t.shape[0], -1, *t.shape[2:])
            for t in (k, v)
        )
        given = mask if kind in ("masked", "window") else None
        out = F.scaled_dot_product_attention(q, k, v, given, is_causal=kind == "causal", scale=0.3)
        return F.linear(out.transpose(1, 2).flatten(2), net.o).pow(2).mean()

    shapes = {"q": (16, 8), "k": (8, 8), "v": (8, 8), "o": (8, 16)}
    batch = {"x": numbers(2, 8, 8)}
    by = {"x": Shard(1, zigzag=zigzag)}
    ran = compare(call, shapes, batch, {}, by, degree=degree, attention="ring", zigzag=zigzag)
    assert ran["shift"] == ran["back shift_back"] == 2 * (degree - 1)
    assert "all_gather" not in ran


@pytest.mark.parametrize("kind", ["causal", "longer", "shorter", "padded"])
def test_only_a_mask_that_is_causal_is_left_out(kind: str) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        q = (batch["x"] * net.scale).unflatten(-1, (4, 2)).transpose(1, 2)
        places = torch.arange(8, device=q.device)
        mask = places[:, None] + {"longer": 1, "shorter": -1}.get(kind, 0) >= places[None, :]
        mask = mask | (places[None, :] == 0)
        if kind == "padded":
            mask = mask & (batch["x"][:, :, 0] < 5.0)[:, None, None, :]
        return F.scaled_dot_product_attention(q, q, q, mask).pow(2).mean()

    batch, by = {"x": numbers(2, 8, 8)}, {"x": Shard(1)}
    made = divided(call, {"scale": (8,)}, batch, {}, by)
    called = {str(node.target) for node in made.recorded().graph.nodes}
    assert ("piper.ring_attend.default" in called) == (kind == "causal")
    assert ("aten.scaled_dot_product_attention.default" in called) == (kind != "causal")
    compare(call, {"scale": (8,)}, batch, {}, by)


def test_a_fused_product_that_is_split_is_divided_block_by_block() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        q, k, v = F.linear(batch["x"], net.qkv, net.b).chunk(3, -1)
        return F.linear(q * torch.sigmoid(k) + v, net.o).pow(2).mean()

    shapes = {"qkv": (24, 8), "b": (24,), "o": (8, 8)}
    made = divided(call, shapes, X, {"qkv": Shard(0), "b": Shard(0), "o": Shard(1)})
    assert made.sharding.weights["qkv"] == Shard(0, 3) == made.sharding.weights["b"]
    compare(call, shapes, X, {"qkv": Shard(0), "b": Shard(0), "o": Shard(1)})


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(2, 4, 4, 4),
    "flatten": lambda h: h.flatten(0, 1),
    "transpose": lambda h: h.transpose(0, 2),
    "permute": lambda h: h.permute(2, 0, 1),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "squeeze": lambda h: h.unsqueeze(0).squeeze(0),
    "select": lambda h: h.select(1, 2),
    "slice": lambda h: h[:, 1:3],
    "chunk": lambda h: h.chunk(2, 1)[1],
    "split": lambda h: h.split([1, 3], 1)[1],
    "unbind": lambda h: h.unbind(0)[1],
    "cat": lambda h: torch.cat([h, h * 2], 1),
    "stack": lambda h: torch.stack([h, h * 2], 1),
    "expand": lambda h: h.unsqueeze(1).expand(2, 3, 4, 16),
    "clone": lambda h: h.clone(),
    "softmax elsewhere": lambda h: h.softmax(1),
    "softmax": lambda h: h.softmax(-1),
    "log softmax": lambda h: h.log_softmax(-1),
    "mean": lambda h: h.mean(-1),
    "mean elsewhere": lambda h: h.mean(1),
    "mean of all": lambda h: h.mean(),
    "sum": lambda h: h.sum(-1, keepdim=True),
    "where": lambda h: torch.where(h > 0, h, -h),
    "matmul": lambda h: h @ h.transpose(1, 2),
    "matmul of divided rows": lambda h: h.transpose(1, 2) @ h,
    "broadcast": lambda h: h * torch.arange(16.0, dtype=h.dtype),
}


@pytest.mark.parametrize("name", MOVES)
def test_operations_on_a_divided_value(name: str) -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        h = F.linear(batch["x"], net.w)
        return (MOVES[name](h) * 1.5).sin().pow(2).sum()

    compare(call, {"w": (16, 8)}, X, {"w": Shard(0)})


@pytest.mark.parametrize(
    ("old", "new", "layout", "wanted"),
    [
        ((2, 8, 6), (16, 6), Shard(1), Shard(0, 2)),
        ((16, 6), (2, 8, 6), Shard(0, 2), Shard(1)),
        ((2, 8), (2, 4, 2), Shard(1), Shard(1)),
        ((2, 4, 2), (2, 8), Shard(1), Shard(1)),
        ((1, 8, 6), (8, 6), Shard(1), Shard(0)),
        ((8, 6), (1, 8, 6), Shard(0), Shard(1)),
        ((2, 6), (2, 3, 2), Shard(1), None),
        ((2, 3, 4), (2, 12), Shard(2), Shard(1, 3)),
    ],
)
def test_a_reshape_carries_a_division(
    old: tuple[int, ...], new: tuple[int, ...], layout: Shard, wanted: Shard | None
) -> None:
    assert reshaped(old, new, layout, 2) == wanted


def test_an_operation_without_a_rule_is_named_with_its_line() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return torch.renorm(F.linear(batch["x"], net.w), 2, 0, 1.0).sum()

    with pytest.raises(CaptureError) as caught:
        divided(call, {"w": (16, 8)}, X, {"w": Shard(0)})
    text = str(caught.value)
    assert "has no rule for how it is sharded" in text and "shard #0" in text
    assert "piper.sharding_rule" in text and "test_rules.py" in text


def test_heads_that_do_not_divide_are_refused() -> None:
    def call(net: Net, batch: Batch) -> Tensor:
        return cast(Tensor, F.linear(batch["x"], net.w).unflatten(-1, (3, 4)).sum())

    with pytest.raises(CaptureError, match="3 heads do not divide by 2"):
        divided(call, {"w": (12, 8)}, X, {"w": Shard(0)})
