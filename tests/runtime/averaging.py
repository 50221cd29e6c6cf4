"""Groups that train apart, in plain PyTorch: a model, an optimizer and a share of the samples each, in a loop.

It shares no code with Piper but the marks in the model, which do nothing here.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper

SAMPLES = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.first(x))
        with piper.annotate("PP"):
            x = self.second(x)
        return x


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def weighted_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    weight = batch["w"]
    return (
        nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * weight
    ).sum(), weight.sum()


def data() -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        x, w = (
            torch.rand(*shape, generator=draws, dtype=torch.float64) for shape in ((SAMPLES, 6), (SAMPLES,))
        )
        return {"x": x, "y": torch.randint(4, (SAMPLES,), generator=draws), "w": w}

    return [batch() for _ in range(12)]


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)  # type: ignore[arg-type]


def plain_average(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)  # type: ignore[arg-type]


def nesterov(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # type: ignore[arg-type]


def heavy_ball(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.5)  # type: ignore[arg-type]


def plain_groups(
    groups: int,
    every: int,
    steps: int,
    *,
    loss: Callable[..., Tensor | tuple[Tensor, Tensor]] = mean_loss,
    clip: float | None = None,
    outer: Callable[..., torch.optim.Optimizer] | None = None,
    fragments: Sequence[Sequence[str]] = (("first.weight", "first.bias", "second.weight", "second.bias"),),
    overlap: int = 0,
    keep: float = 0.0,
) -> tuple[list[float], list[Net]]:
    """Return the mean of the groups' losses in each step, and the groups' models in the end."""
    torch.manual_seed(0)
    first = Net().double()
    models = [copy.deepcopy(first) for _ in range(groups)]
    optimizers = [adamw(one.parameters()) for one in models]
    common = {name: p.detach().clone().requires_grad_() for name, p in first.named_parameters()}
    outers = [(outer or plain_average)([common[name] for name in names]) for names in fragments]
    losses, sent = [], dict[int, dict[str, Tensor]]()
    for step, batch in zip(range(steps), data(), strict=False):
        total, weights = 0.0, 0.0
        for number, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            size = SAMPLES // groups
            own = {name: field[number * size : (number + 1) * size] for name, field in batch.items()}
            given = loss(one, own)
            value, weight = given if isinstance(given, tuple) else (given, torch.ones(()))
            optimizer.zero_grad()
            (value / weight).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(one.parameters(), clip)
            optimizer.step()
            total, weights = total + value.item(), weights + weight.item()
        losses.append(total / weights)
        for number, names in enumerate(fragments):
            since = (step + 1 - number * every // len(fragments)) % every
            if since == 0:
                local = {name: [dict(one.named_parameters())[name] for one in models] for name in names}
                sent[number] = {
                    name: torch.stack([p.detach() for p in ps]).mean(0) for name, ps in local.items()
                }
            if since == overlap and number in sent:
                for name in names:
                    common[name].grad = common[name].detach() - sent[number][name]
                outers[number].step()
                with torch.no_grad():
                    for one in models:
                        for name in names:
                            local_one = dict(one.named_parameters())[name]
                            local_one.copy_(keep * local_one + (1 - keep) * common[name])
    return losses, models


def job(
    *strategy: piper.Directive,
    loss: Callable[..., Tensor | tuple[Tensor, Tensor]] = mean_loss,
    clip: float | None = None,
) -> piper.Job:
    return piper.Job(
        model=Net, loss=loss, data=data, strategy=strategy, optimizer=adamw, precision="fp64", clip_norm=clip
    )


def train(
    program: object, steps: int, on: str = "inline", save: Path | None = None, resume: Path | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train some steps; return the losses and the state of the first group."""
    with piper.launch(program, on=on, resume=resume) as run:  # type: ignore[arg-type]
        losses = [result.loss for result in run.train(steps)]
        if save is not None:
            run.save(save)
        return losses, run.state_dict()


def assert_same(got: tuple[list[float], dict[str, Tensor]], losses: list[float], model: nn.Module) -> None:
    assert got[0] == pytest.approx(losses, rel=0, abs=1e-9)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(got[1][name], value, rtol=0, atol=1e-9)
