"""`tune_lengths` gives each length a strategy, and counts the moves between those that hold state apart."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.checkpoint.moves import moving_plans
from piper.directives import Directive
from piper.errors import ConfigError, ScheduleError
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate
from piper.tuning.choice import Recompute
from piper.tuning.lengths import (
    check_fits,
    first_of_each_length,
    mean_move,
    programs_by_length,
    simulated_moves,
    tune_lengths,
)
from piper.tuning.space import Space

DIM = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, DIM), nn.Linear(DIM, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def rows(samples: int, length: int) -> dict[str, Tensor]:
    return {name: torch.zeros(samples, length, dtype=torch.long) for name in ("tokens", "labels")}


def job() -> piper.Job:
    data = [rows(4, 16), rows(4, 16), rows(1, 2048), rows(4, 16)]
    return piper.Job(model=lambda: piper.annotate_layers(Net()), loss=loss, data=lambda: data)


ONE_RANK = Space(ranks=(1,), zeros=(3,), recompute=(Recompute(),), tensor=(1,))


@pytest.mark.slow
def test_one_long_row_is_shared_and_short_rows_are_not() -> None:
    tuned = tune_lengths(job(), "h100", 2, space=ONE_RANK, trials=3, workers=1)
    assert tuned.shares == {16: 0.75, 2048: 0.25}
    contexts = {length: one.best.choice.context for length, one in tuned.tuned.items()}
    assert contexts == {16: 1, 2048: 2}  # one sample cannot be sliced for two replicas
    steps = [one.best.step for one in tuned.tuned.values()]
    assert tuned.step == pytest.approx(0.75 * steps[0] + 0.25 * steps[1]) and not tuned.moves
    assert list(json.loads(tuned.json)) == ["16", "2048"]
    program = piper.compile(replace(job(), strategy=tuned.strategies))
    assert program.shaped(rows(1, 2048)).plans.devices == program.plans.devices


def test_moves_count_as_often_as_lengths_follow_each_other() -> None:
    devices = range(2)
    strategies: dict[int, list[Directive]] = {
        16: [piper.replicate(piper.at(), devices, zero=3)],
        2048: [
            piper.replicate(piper.at(), devices),
            piper.shard(piper.at(), devices, axis="CP", batch={"tokens": 1, "labels": 1}),
        ],
    }
    program = piper.compile(replace(job(), strategy=strategies))
    programs = {16: program, 2048: program.shaped(rows(1, 2048))}
    costs = Roofline(load_cluster("h100"))
    there, back = (
        simulate(
            moving_plans(programs[a].plans.buckets, programs[b].plans.buckets, (0, 1), 8), None, costs
        ).step
        for a, b in ((16, 2048), (2048, 16))
    )
    assert there > 0 < back  # shards are gathered there, and nothing travels back: its time is latency
    shares = {16: 0.75, 2048: 0.25}
    moves = simulated_moves(programs, costs)
    assert mean_move(moves, shares) == pytest.approx(0.75 * 0.25 * (there + back))
    assert [(move.before, move.after, move.nbytes > 0) for move in moves] == [
        (16, 2048, True),
        (2048, 16, False),
    ]
    check_fits(moves, moves[0].peak)
    with pytest.raises(ScheduleError) as refused:
        check_fits(moves, moves[0].peak - 1)
    assert str(refused.value).splitlines()[0] == "tune: the state does not fit while it moves"
    assert "from batches of length 16 to 2048" in str(refused.value)


@pytest.mark.slow
def test_lengths_that_cannot_hold_parameters_alike_are_refused() -> None:
    """Nothing but context parallelism can share one row, and it is not allowed."""
    with pytest.raises(ConfigError, match="no candidate can be compiled"):
        tune_lengths(job(), "h100", 2, space=replace(ONE_RANK, context=(1,)), trials=2, workers=1)


def test_lengths_are_those_of_the_padded_batches() -> None:
    padded = replace(job(), buckets=piper.Buckets(lengths=[64, 4096], pad={"tokens": 0, "labels": -100}))
    given = [piper.replicate(piper.at(), range(2))]
    program = piper.compile(replace(padded, strategy={64: given, 4096: given}))
    assert [*programs_by_length(program)] == [64, 4096]
    first, shares = first_of_each_length(padded, 3)
    assert {length: batch["tokens"].shape[0] for length, batch in first.items()} == {64: 4, 4096: 1}
    assert shares == {64: pytest.approx(2 / 3), 4096: pytest.approx(1 / 3)}
    with pytest.raises(ConfigError, match="batches=0"):
        tune_lengths(job(), "h100", 2, batches=0)
