"""A small mixture of experts whose routing is skewed, marked for Piper and in plain PyTorch."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

import piper
from piper import Directive, at, replicate, shard
from piper.compiler import Program, compile
from tests import plain

WIDTH, EXPERTS, ROWS = 6, 8, 16


class Mixture(nn.Module):
    """Two layers of experts. Most rows go to the first expert of a layer, some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 2)
        self.router.bias.data.add_(torch.linspace(1.5, -1.5, EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        score, chosen = self.router(x).softmax(dim=-1).max(dim=-1)
        result: Tensor = x + score[:, None] * self.mix(x, chosen)
        return result

    def mix(self, x: Tensor, chosen: Tensor) -> Tensor:
        counts = nn.functional.one_hot(chosen, EXPERTS).sum(dim=0)
        order = chosen.argsort(stable=True)
        with piper.annotate("EP"):
            rows, received = piper.route(x[order], counts)
            hidden = piper.grouped_mm(rows, self.up, received).tanh()
            rows = piper.unroute(piper.grouped_mm(hidden, self.down, received), received, len(x))
        return rows[order.argsort()]


class PlainMixture(nn.Module):
    """The same parameters, and each row times the matrices of its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PlainLayer(Layer):
    def mix(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.einsum("nd,ndf->nf", x, self.up[chosen]).tanh()
        return torch.einsum("nf,nfd->nd", hidden, self.down[chosen])


def loss(model: nn.Module, batch: plain.Batch) -> Tensor:
    result: Tensor = (model(batch["x"]) - 1).square().mean()
    return result


def batches(steps: int) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=rng)} for _ in range(steps)]


def adam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def cloned(ways: int = 4, clones: int = 2, zero: int = 0) -> list[Directive]:
    return [
        replicate(at(), devices=range(4), zero=zero),
        shard(at(EP="*"), devices=range(4), ways=ways, clones=clones),
    ]


def program(
    strategy: Sequence[Directive],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adam,
    model: Callable[[], nn.Module] = Mixture,
    data: Callable[[], list[dict[str, Tensor]]] = lambda: batches(4),
    **more: object,
) -> Program:
    job = piper.Job(
        model=model,
        loss=loss,
        data=data,
        strategy=strategy,
        optimizer=optimizer,
        precision="fp64",
        **more,  # type: ignore[arg-type]
    )
    return compile(job, device="cpu")
