"""The model of the examples: two stages, PP=0 and PP=1, and a head, which joins the second."""

from collections.abc import Mapping

import torch
from torch import nn

import piper

WIDTH, SAMPLES = 32, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            with piper.annotate("PP"):
                x = torch.relu(stage(x))
        return self.head(x)


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def data() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "y": x[:, :1]}]


def job(*strategy: piper.Directive) -> piper.Job:
    """A job that trains the model under a strategy."""
    return piper.Job(model=Net, loss=loss, data=data, strategy=strategy)
