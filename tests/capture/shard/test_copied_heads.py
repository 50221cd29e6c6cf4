"""Operations on heads that several devices hold: each does its own part, and nothing is counted twice."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.capture.shard.layout import CopiedShard, divides, in_words, local_shape, reshaped
from piper.errors import CaptureError
from piper.ir.sharding import Shard
from tests.capture.shard.test_rules import Batch, Call, Net, X, compare, divided

SHAPES = {"q": (16, 8), "k": (8, 8), "out": (8, 16), "scale": (4, 1, 1)}
WEIGHTS = {"q": Shard(0), "k": Shard(0), "out": Shard(1)}
Use = Callable[[Tensor, Tensor], Tensor]  # of queries [2, 4, 4, 4] and keys [2, 2, 4, 4]


def calling(use: Use) -> Call:
    """Return a loss of four heads of queries, each scaled, and two of keys."""

    def call(net: Net, batch: Batch) -> Tensor:
        q, k = (F.linear(batch["x"], w).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (net.q, net.k))
        return F.linear(use(q * net.scale, k).transpose(1, 2).flatten(2), net.out).pow(2).sum()

    return call


def test_a_layout_whose_slices_are_copied() -> None:
    layout = CopiedShard(2, copies=2)
    assert local_shape((2, 4, 8), layout, 4) == (2, 4, 4)
    assert divides(2, layout, 4) and not divides(3, layout, 4)
    assert reshaped((2, 4, 8), (2, 4, 2, 4), layout, 4) == layout
    assert reshaped((2, 4, 8), (2, 4, 1, 8), CopiedShard(2, copies=4), 4) == CopiedShard(2, copies=4)
    assert layout != Shard(2) and Shard(2) != layout
    assert in_words(layout) == "sharded along 2, each slice on 2 devices"


REFUSED: dict[str, Use] = {
    "a sum over heads": lambda q, k: q + k.sum(1, keepdim=True),
    "a mean": lambda q, k: q * k.mean(),
    "a norm of all heads": lambda q, k: q * k.transpose(1, 2).flatten(2).softmax(-1).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_count_a_head_twice_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="cannot be sharded"):
        divided(calling(REFUSED[name]), SHAPES, X, WEIGHTS, degree=4)


def repeated(k: Tensor) -> Tensor:
    return k.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)


def numbered(k: Tensor) -> Tensor:
    """Repeat heads, and make each of them another."""
    heads = repeated(k)
    return heads * torch.arange(1.0, 5.0, dtype=k.dtype, device=k.device).view(4, 1, 1)


ALLOWED: dict[str, Use] = {
    "grouped": lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    "repeated": lambda q, k: F.scaled_dot_product_attention(q, repeated(k), repeated(k)),
    "numbered": lambda q, k: F.scaled_dot_product_attention(q, numbered(k), numbered(k)),
    "by hand": lambda q, k: (q @ numbered(k).mT).softmax(-1) @ repeated(k),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_attention_exchanges_no_heads(name: str) -> None:
    call = calling(ALLOWED[name])
    assert divided(call, SHAPES, X, WEIGHTS, degree=4).sharding.weights["k"] == CopiedShard(0, copies=2)
    ran = compare(call, SHAPES, X, WEIGHTS, degree=4)
    assert ran == {"all_reduce": 1, "back none": 1}, "of the output alone"
