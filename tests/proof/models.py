"""Tiny models, each for one thing that a plan can do: seconds to capture, milliseconds to run."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from piper.capture.trace.annotate import annotate
from piper.experts import grouped_mm, route, unroute

WIDTH, EXPERTS = 6, 4
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | tuple[Tensor, Tensor]]


def batch(samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Inputs, labels, and a mask that leaves out some labels of most samples."""
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(samples, WIDTH, generator=rng) for _ in range(2))
    return {"x": x, "y": y, "mask": (torch.rand(samples, WIDTH, generator=rng) < 0.7).float()}


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return mse_loss(model(batch["x"]), batch["y"])


def weighted_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sum over the labels that count, and how many these are."""
    return ((model(batch["x"]) - batch["y"]).square() * batch["mask"]).sum(), batch["mask"].sum()


class Dense(nn.Module):
    """Linear layers, one stage each."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x))
        return x


class Tied(Dense):
    """Two stages that share one weight, and have one of their own each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(self.shared(layer(x)))
        return x


class Skipping(Dense):
    """Three stages; the first one's output is read by both others."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            first = torch.tanh(self.layers[0](x))
        with annotate("PP"):
            second = torch.tanh(self.layers[1](first))
        with annotate("PP"):
            last: Tensor = self.layers[2](first * second)
        return last


class Normed(Dense):
    """Stages with BatchNorm: buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            with annotate("PP"):
                x = norm(layer(x))
        return x


class Layered(Dense):
    """Two stages of two regions each, so that a stage has several chunks."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in range(2):
            with annotate("PP"):
                for layer in self.layers[2 * stage : 2 * stage + 2]:
                    with annotate("LAYER"):
                        x = torch.tanh(layer(x))
        return x


class Routed(Dense):
    """Stages of experts between linear layers; each row goes to the expert of its largest feature."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.experts, strict=True):
            with annotate("PP"):
                hidden = layer(x)
                chosen = hidden[:, :EXPERTS].argmax(-1)
                order = chosen.argsort(stable=True)
                counts = (chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)).sum(0)
                with annotate("EP"):
                    rows, arrived = route(hidden[order], counts)
                    back = unroute(grouped_mm(rows, weight, arrived), arrived, len(hidden))
                x = hidden + torch.zeros_like(back).index_copy(0, order, back)
        return x
