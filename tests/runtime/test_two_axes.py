"""Two axes that shard the same dimension: the outer one cuts first, in what is loaded as in what is computed."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Directive, at, replicate, shard
from piper.ir.sharding import Sharding, indices_of_dim
from piper.run.launch import launch_inline
from tests import plain

VOCAB, WIDTH, LENGTH = 16, 8, 8
FOUR = range(4)
WEIGHTS = {"embedding|up|q|k|v|head": 0, "down|out": 1}
FIELDS = {"tokens": 1, "labels": 1}


class Net(nn.Module):
    """A table, attention that knows positions, a feed-forward and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (layer(x).unflatten(-1, (4, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        logits: Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return logits


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def data() -> list[dict[str, Tensor]]:
    drawn = torch.randint(VOCAB, (2, 2, 4, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"tokens": tokens, "labels": labels} for tokens, labels in drawn]


def tensor(axis: str, weights: Mapping[str, int] = WEIGHTS, between: int | None = None) -> Directive:
    return shard(at(), FOUR, 2, axis=axis, weights=weights, between=between)


def context(axis: str, attention: str, balance: str | None = None) -> Directive:
    return shard(at(), FOUR, 2, axis=axis, batch=FIELDS, attention=attention, balance=balance)


STRATEGIES: dict[str, list[Directive]] = {
    "weights": [tensor("TP"), tensor("VP")],
    "a table": [tensor("TP", {"embedding": 0}), tensor("VP", {"embedding": 0})],
    "a head": [tensor("TP", {"head": 0}), tensor("VP", {"head": 0})],
    "between": [tensor("TP", between=1), tensor("VP")],
    "zero": [
        replicate(at(), range(8), zero=3),
        *(shard(at(), range(8), 2, axis=axis, weights=WEIGHTS) for axis in ("TP", "VP")),
    ],
    "the sequence": [context("CP", "gather"), context("SP", "heads")],
}


@pytest.mark.parametrize(
    "name",
    ["weights", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "weights")],
)
def test_the_numbers_are_those_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    """Also of the run that goes on with one device."""
    first, second = data()
    wanted = plain.train(Net, mean, [first, second])
    job = piper.Job(
        model=Net, loss=loss, data=data, strategy=STRATEGIES[name], optimizer=plain.sgd, precision="fp64"
    )
    with launch_inline(piper.compile(job, device="cpu")) as run:
        losses = [run.step(first).loss]
        run.save(tmp_path / "saved")
        losses.append(run.step(second).loss)
        assert plain.largest_difference(wanted.state, run.state_dict()) < 1e-12
    assert losses == pytest.approx(wanted.losses, abs=1e-12)
    alone = piper.Job(model=Net, loss=loss, data=data, strategy=[], optimizer=plain.sgd, precision="fp64")
    with piper.launch(piper.compile(alone, device="cpu"), resume=tmp_path / "saved") as run:
        assert run.step(second).loss == pytest.approx(wanted.losses[1], abs=1e-12)
        assert plain.largest_difference(wanted.state, run.state_dict()) < 1e-12


def test_the_outer_axis_cuts_first() -> None:
    """Neighbours hold neighbouring slices."""
    inner, outer = Sharding(dim=0, degree=2), Sharding(dim=0, degree=2, stride=2)
    held = [indices_of_dim(0, 8, (inner, outer), position) for position in range(4)]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7]]
    zigzag = Sharding(dim=0, degree=2, stride=2, zigzag=True)
    assert [indices_of_dim(0, 8, (inner, zigzag), position) for position in range(4)] == [
        [0, 1], [6, 7], [2, 3], [4, 5]
    ]  # fmt: skip
