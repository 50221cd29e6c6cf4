"""Divided regions beside tied weights, ZeRO and experts: the numbers of plain PyTorch, or an error about the strategy."""

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import ScheduleError
from tests import plain
from tests.runtime.against_plain import difference
from tests.runtime.divided import job_of

VOCAB, WIDTH = 12, 8
WEIGHTS = {"embedding": 0, "up.0|up.1": 0, "down.0|down.1": 1}


class Tied(nn.Module):
    """Two stages; the last one multiplies by the embedding of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.embedding(tokens)
            x = x + self.down[0](torch.tanh(self.up[0](x)))
        with piper.annotate("PP"):
            x = x + self.down[1](torch.tanh(self.up[1](x)))
            return nn.functional.linear(x, self.embedding.weight)


def loss(model: nn.Module, batch: plain.Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def tokens(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(VOCAB, (rows, 4), generator=generator) for name in ("x", "y")}


def two_stages(zero: int, dp: int, ways: int) -> list[piper.Directive]:
    sets = [[*range(dp * ways)], [*range(dp * ways, 2 * dp * ways)]]
    return [
        *(piper.replicate(piper.at(PP=stage), devices, zero=zero) for stage, devices in enumerate(sets)),
        *(
            piper.shard(piper.at(PP=stage), devices, ways, axis="TP", weights=WEIGHTS)
            for stage, devices in enumerate(sets)
        ),
        piper.split(piper.at(), parts=2),
    ]


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_weight_tied_across_stages_under_tensor_parallelism_and_zero(zero: int, dp: int) -> None:
    assert difference(Tied, loss, tokens, two_stages(zero, dp, ways=2)) < 1e-12


def test_groups_of_one_device_divide_nothing() -> None:
    assert difference(Tied, loss, tokens, two_stages(3, dp=2, ways=1)) < 1e-12


class Frozen(nn.Module):
    """A layer whose scale has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = h.abs().mean(-1, keepdim=True)
        y: Tensor = self.down(torch.tanh(h * scale))
        return y


def test_a_part_without_gradients_has_none_in_a_divided_model() -> None:
    def data(rows: int, seed: int) -> plain.Batch:
        return {
            "x": torch.randn(
                rows, 4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
        }

    def distance(model: nn.Module, batch: plain.Batch) -> Tensor:
        y: Tensor = model(batch["x"])
        return (y - 1).square().mean()

    strategy = [piper.shard(piper.at(), [0, 1], axis="TP", weights={"up": 0, "down": 1})]
    assert difference(Frozen, distance, data, strategy) < 1e-12


def test_experts_wider_than_the_groups_that_are_left_are_refused() -> None:
    strategy = [
        piper.shard(piper.at(), [0, 1, 2, 3], 2, axis="TP", weights={"*attention.out": 1}),
        piper.shard(piper.at(EP="*"), [0, 1, 2, 3], ways=4),
    ]
    with pytest.raises(ScheduleError) as caught:
        piper.compile(job_of("moe", 1, lambda _: strategy))
    assert "4 devices cannot form groups of 8" in str(caught.value)
    assert caught.value.facts["groups"] == "TP=2 x experts=4"
    assert "a multiple of 8 devices" in caught.value.hint
