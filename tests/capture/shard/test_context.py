"""Common operations along dimensions that context parallelism does not shard: each has the numbers of eager."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.ir.sharding import Shard
from tests.capture.shard.verdict import Sample, Verdict, judge, recorded

COMMON: dict[
    str, Callable[[Tensor, Tensor, Tensor], Tensor]
] = {  # of x and y of [2, 12, 6], labels of [2, 12]
    "argmax": lambda x, y, t: x.argmax(-1),
    "argmin": lambda x, y, t: x.argmin(-1),
    "max": lambda x, y, t: x.max(-1).values,
    "min": lambda x, y, t: x.min(-1).values,
    "amax": lambda x, y, t: x.amax(-1),
    "amin": lambda x, y, t: x.amin(-1),
    "logsumexp": lambda x, y, t: x.logsumexp(-1),
    "norm": lambda x, y, t: x.norm(dim=-1),
    "normalize": lambda x, y, t: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x, y, t: F.cosine_similarity(x, y, dim=-1),
    "sort": lambda x, y, t: x.sort(-1).values,
    "argsort": lambda x, y, t: x.argsort(-1),
    "topk": lambda x, y, t: x.topk(2).values,
    "median": lambda x, y, t: x.median(-1).values,
    "cumsum": lambda x, y, t: x.cumsum(-1),
    "cumprod": lambda x, y, t: x.cumprod(-1),
    "prod": lambda x, y, t: x.prod(-1),
    "var": lambda x, y, t: x.var(-1),
    "std": lambda x, y, t: x.std(-1, correction=0),
    "any": lambda x, y, t: (x > 0).any(-1),
    "flip": lambda x, y, t: x.flip(-1),
    "roll": lambda x, y, t: x.roll(1, -1),
    "pad": lambda x, y, t: F.pad(x, (1, 2)),
    "diff": lambda x, y, t: x.diff(dim=-1),
    "repeat": lambda x, y, t: x.repeat(1, 1, 2),
    "repeat_interleave": lambda x, y, t: x.repeat_interleave(2, -1),
    "repeat of the sequence": lambda x, y, t: x.repeat(1, 2, 1) * y.repeat(1, 2, 1),
    "repeat_interleave of the sequence": lambda x, y, t: x.repeat_interleave(2, 1),
    "scatter_": lambda x, y, t: torch.full_like(x, -1.0).scatter_(-1, y.topk(2).indices, x.topk(2).values),
    "assigned parts": lambda x, y, t: filled(x, y),
    "products with all": lambda x, y, t: (x[:, :, None] @ y.mT[:, None]).sort(-1).values,
    "index_select": lambda x, y, t: x.index_select(-1, torch.tensor([0, 2])),
    "take_along_dim": lambda x, y, t: x.take_along_dim(y.argsort(-1), -1),
    "einsum": lambda x, y, t: torch.einsum("bsd,bsd->bs", x, y),
    "product with a vector": lambda x, y, t: x @ torch.ones(6, dtype=x.dtype),
    "mse_loss": lambda x, y, t: F.mse_loss(x, y),
    "l1_loss": lambda x, y, t: F.l1_loss(x, y, reduction="sum"),
    "huber_loss": lambda x, y, t: F.huber_loss(x, y, delta=0.5),
    "binary_cross_entropy": lambda x, y, t: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "with logits": lambda x, y, t: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl_div": lambda x, y, t: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "nll_loss": lambda x, y, t: F.nll_loss(x.log_softmax(-1).flatten(0, 1), t.flatten()),
    "label smoothing": lambda x, y, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "class weights": lambda x, y, t: F.cross_entropy(
        x.flatten(0, 1), t.flatten(), torch.arange(1.0, 7, dtype=x.dtype)
    ),
}


def old(name: str) -> pytest.MarkDecorator:
    refused = name == "scatter_" and torch.__version__.startswith("2.11.")
    return pytest.mark.xfail(refused, reason="DTensor of torch 2.11 has no rule along another dimension")


def filled(x: Tensor, y: Tensor) -> Tensor:
    made = x.new_empty(2, 12, 8)
    made[..., :6] = x
    made[..., 6:] = y[..., :1]
    made[..., 2:4] *= y[..., 1:3]
    return made


def judged(name: str, degree: int, zigzag: bool) -> Verdict:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(2, 12, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in "xy")
    labels = torch.randint(0, 6, (2, 12), generator=generator)
    labels[0, :5] = -100
    sample = Sample(name=name, call=lambda *given: [COMMON[name](*given)], tensors=(x, y, labels))
    return judge(sample, recorded(sample), [Shard(1, zigzag=zigzag)] * 3, degree)


@pytest.mark.parametrize("name", [pytest.param(name, marks=old(name)) for name in COMMON])
def test_an_operation_along_another_dimension(name: str) -> None:
    assert judged(name, 3, zigzag=True) == Verdict(kind="equal")
