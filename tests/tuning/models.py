"""Small models to tune, and a space small enough to try all of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

import piper
from piper.capture.recordings import Recordings
from piper.simulate.measured import prices_of
from piper.tuning.choice import Recompute
from piper.tuning.evaluate import Evaluation, Leaf, evaluate
from piper.tuning.model import captured_model
from piper.tuning.space import Space
from piper.tuning.strategy_search import StrategySearch

DIM = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x).relu())
        return x + made


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 4 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(x)
        return made


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = model(batch["x"])
    return made.square().mean()


def data() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.zeros(16, 8, DIM)}]


def build() -> nn.Module:
    return piper.annotate_layers(Tower())


def tower() -> piper.Job:
    """Four layers and a head that costs as much as two of them."""
    return piper.Job(model=build, loss=loss, data=data)


JOB = tower()
SMALL = Space(
    ranks=(1, 2),
    rows=(2, 4),
    schedules=("1f1b", "zero-bubble", "zbv", "synthesised"),
    zeros=(0, 1, 2, 3),
    recompute=(Recompute(), Recompute(across=True)),
    neighbours=("replicas",),
)


@dataclass(slots=True)
class Everything:
    """Every candidate of a space with its bounds, evaluated one by one."""

    search: StrategySearch
    leaves: list[Leaf] = field(default_factory=list)
    found: list[Evaluation] = field(default_factory=list)


def search_of(space: Space, devices: int, cluster: str, captured: Recordings | None = None) -> StrategySearch:
    """A search that has not begun."""
    model = captured_model(JOB, prices_of(cluster, None), space, devices, captured)
    return StrategySearch(
        model=model,
        space=space,
        gap=0.0,
        synthesis_trials=60,
        report=lambda search, found: None,
    )


def everything(search: StrategySearch, limit: int) -> Everything:
    """Try all of a space: no bound discards anything."""
    made = Everything(search)
    for group in search.groups():
        for leaf in search.leaves(group, limit)[0]:
            done = list(search.synthesised(leaf, limit)) if leaf.open else [leaf]
            for one in done:
                made.leaves.append(one)
                made.found.append(evaluate(search.model, one.choice, one.grid))
    return made
