"""A few samples of the operations that models are made of, several in each: quick, for every run."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.opinfo.sample import Sample

X = torch.linspace(-1.5, 2.0, 24, dtype=torch.float64).reshape(2, 3, 4)
W = torch.linspace(-0.5, 1.0, 20, dtype=torch.float64).reshape(5, 4).sin()
SQUARE = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4).cos() + torch.eye(
    4, dtype=torch.float64
)
PLACES = torch.tensor([2, 0, 1])
LABELS = torch.tensor([[1, 0, 3], [2, 2, 0]])


def samples() -> Iterator[Sample]:
    """Return one sample of each kind of operation."""
    yield Sample(name="pointwise", call=pointwise, args=(X,))
    yield Sample(name="reductions", call=reductions, args=(X,))
    yield Sample(name="shapes", call=shapes, args=(X,))
    yield Sample(name="indices", call=indices, args=(X, PLACES))
    yield Sample(name="products", call=products, args=(X, W, SQUARE))
    yield Sample(name="norms and losses", call=norms_and_losses, args=(X, LABELS))
    yield Sample(name="writes", call=writes, args=(X, PLACES), inside=True)
    yield Sample(name="draws", call=draws, args=(X,))


def pointwise(x: Tensor) -> list[Tensor]:
    calls: list[Callable[..., Any]] = [
        torch.sgn,
        torch.sign,
        torch.erf,
        torch.tanh,
        F.silu,
        F.gelu,
        F.softplus,
    ]
    more = [
        x.clamp(-1, 1),
        torch.where(x > 0, x, x.exp()),
        torch.lerp(x, x * x, 0.3),
        x.round(),
        x.abs().sqrt(),
    ]
    return [*(call(x) for call in calls), *more]


def reductions(x: Tensor) -> list[Tensor]:
    best, places = x.max(-1)
    kept = [
        x.amax(1),
        x.argmax(-1),
        x.norm(dim=1),
        x.logsumexp(0),
        x.var(1),
        x.prod(2),
        x.cumsum(1),
        x.median(),
    ]
    return [best, places, *kept, *x.topk(2), *x.sort(1, descending=True), x.any(), x.all(-1)]


def shapes(x: Tensor) -> list[Tensor]:
    moved = [x.permute(2, 0, 1), x.flip(1), x.roll(1, 2), x.unfold(2, 2, 1), x.expand(2, 2, 3, 4), x.tril()]
    joined = [
        torch.cat([x, x[:1]]),
        torch.stack([x, -x], 1),
        x.repeat_interleave(2, 1),
        x.T,
        x.diagonal(0, 1, 2),
    ]
    return [
        *moved,
        *joined,
        *x.split([1, 3], 2),
        *x.unbind(1),
        *torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
    ]


def indices(x: Tensor, places: Tensor) -> list[Tensor]:
    taken = [
        x[:, places],
        x[x > 0],
        x[..., None, -1],
        x.index_select(1, places),
        x.take_along_dim(x.argsort(2), 2),
    ]
    summed = [
        torch.zeros_like(x).index_add(1, places, x),
        x.scatter_add(1, places[None, :, None].expand_as(x), x),
    ]
    return [*taken, *summed, F.embedding(places, x[0]), F.one_hot(places, 4), x.masked_fill(x > 1, 0.5)]


def products(x: Tensor, w: Tensor, square: Tensor) -> list[Tensor]:
    linear = [x @ w.T, F.linear(x, w), torch.einsum("bij,kj->bik", x, w), torch.baddbmm(x, x[:, :, :3], x)]
    solved = [torch.linalg.solve(square, w.T), torch.linalg.det(square), torch.linalg.inv(square)]
    wide = x[:, None]
    return [*linear, *solved, F.scaled_dot_product_attention(wide, wide, wide, is_causal=True), F.glu(x)]


def norms_and_losses(x: Tensor, labels: Tensor) -> list[Tensor]:
    flat, wanted = x.flatten(0, 1), labels.flatten()
    normed = [F.layer_norm(x, (4,)), F.rms_norm(x, (4,)), F.group_norm(x, 3), F.normalize(x), x.softmax(-1)]
    scored = [F.cross_entropy(flat, wanted, label_smoothing=0.1), F.nll_loss(flat.log_softmax(1), wanted)]
    losses = [F.mse_loss(x, x.detach() + 1), F.binary_cross_entropy_with_logits(x, (x > 0).to(x))]
    return [*normed, *scored, *losses, F.huber_loss(x, x.detach() * 2), F.kl_div(x, x.detach().exp())]


def writes(x: Tensor, places: Tensor) -> list[Tensor]:
    first, view = x * 1, (x * 2).view(6, 4)
    first[:, 1:] = 0.5
    first.index_add_(1, places, x)
    view[0].mul_(3)
    view.add_(1).clamp_(max=4)
    out = torch.empty_like(first)
    torch.mul(first.detach(), 2, out=out)
    torch._foreach_mul_([first, view], 0.5)
    return [first, view, out, x.masked_fill_(x.detach() < 0, 1)]


def draws(x: Tensor) -> list[Tensor]:
    return [
        F.dropout(x, 0.5),
        torch.bernoulli(torch.full_like(x, 0.5)),
        torch.randn_like(x),
        torch.rand(2, 2),
    ]
