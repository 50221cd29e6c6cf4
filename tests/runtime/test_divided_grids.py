"""Regions next to each other that are sharded along different axes, or over other numbers of devices."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Directive, at, place, replicate, shard
from piper.check.check import check
from piper.compiler.build import Program
from piper.models import decoder
from piper.run.launch import launch_inline

CONFIG = decoder.Config(vocab=32, dim=16, layers=2, heads=4, kv_heads=4, head_dim=4, hidden=32, stages=2)
FIELDS = {"tokens": 1, "labels": 1}
TIED = replace(CONFIG, tied=True)
LEFT, RIGHT, FOUR = [0, 1], [2, 3], [4, 5, 6, 7]


def data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(0))
    return [{"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}]


def tensor(stage: int, devices: list[int], between: int | None = None) -> Directive:
    weights = decoder.SHARDED_WEIGHTS
    return shard(at(PP=stage), devices, ways=2, axis="TP", weights=weights, between=between)


def context(stage: int, devices: list[int], ways: int = 2, balance: str | None = None) -> Directive:
    how = "gather" if balance else "ring"
    return shard(at(PP=stage), devices, ways=ways, axis="CP", batch=FIELDS, attention=how, balance=balance)


def run(strategy: list[Directive], config: decoder.Config = CONFIG) -> None:
    known = captured() if config is CONFIG else None
    schedule = piper.schedules.one_f_one_b(2, 2)
    one_set = len({directive.devices[0] for directive in strategy if hasattr(directive, "devices")}) == 1
    split = [piper.split(at(), parts=2), *([] if one_set else schedule)]
    program = piper.compile(job([*strategy, *split], config), device="cpu", captured=known)
    report = check(program, launch_inline, data())
    assert report.ok, report


def job(strategy: list[Directive], config: decoder.Config = CONFIG) -> piper.Job:
    return piper.Job(
        model=partial(decoder.Decoder, config),
        loss=decoder.token_loss,
        data=data,
        strategy=strategy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        precision="fp64",
        clip_norm=0.5,
    )


@lru_cache(maxsize=1)
def captured() -> Program:
    return piper.compile(job([]), device="cpu")


REVERSED = "the axes in another order"
MIXES: dict[str, list[Directive]] = {
    "context, then one device": [context(0, LEFT), place(at(PP=1), [2])],
    "context, then samples with ZeRO": [context(0, LEFT), replicate(at(PP=1), RIGHT, zero=3)],
    "samples with ZeRO, then context": [replicate(at(PP=0), LEFT, zero=2), context(1, RIGHT)],
    "context, then tensor": [context(0, LEFT), tensor(1, RIGHT, between=1)],
    "tensor, then context": [tensor(0, LEFT), context(1, RIGHT)],
    "sequence, then samples": [tensor(0, LEFT, between=1), replicate(at(PP=1), RIGHT, zero=1)],
    "another degree": [context(0, LEFT), context(1, FOUR, ways=4)],
    "another order of the sequence": [context(0, LEFT), context(1, RIGHT, balance="zigzag")],
    "one axis more": [tensor(0, LEFT, between=1), tensor(1, FOUR, between=1), context(1, FOUR)],
    REVERSED: [
        *(tensor(0, [0, 1, 2, 3], between=1), context(0, [0, 1, 2, 3])),
        *(context(1, FOUR), tensor(1, FOUR)),
    ],
    "one set of devices": [context(0, LEFT), tensor(1, LEFT, between=1)],
}


QUICK = ("context, then one device", "sequence, then samples", "context, then tensor", "another degree")


@pytest.mark.parametrize(
    "mix", [mix if mix in QUICK else pytest.param(mix, marks=pytest.mark.slow) for mix in MIXES]
)
def test_regions_sharded_in_different_ways_give_the_numbers_of_one_device(mix: str) -> None:
    run(MIXES[mix])


@pytest.mark.parametrize(
    "mix",
    [
        "context, then tensor",
        *(pytest.param(mix, marks=pytest.mark.slow) for mix in MIXES if mix not in (*QUICK, REVERSED)),
        pytest.param("another degree", marks=pytest.mark.slow),
    ],
)
def test_a_tied_weight_of_regions_sharded_in_different_ways(mix: str) -> None:
    """Each region holds it whole and uses its slice: the gradients of all are terms of one sum."""
    run(MIXES[mix], TIED)


def test_a_tied_weight_that_one_region_alone_uses_in_a_sharded_way_is_refused() -> None:
    weights = {"*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up": 0, "*attention.out|*ffn.down": 1}
    strategy = [
        shard(at(PP=0), LEFT, axis="TP", weights=weights),
        shard(at(PP=1), RIGHT, axis="TP", weights=weights, between=1),
    ]
    with pytest.raises(piper.ScheduleError, match=r"embedding\.weight is a sum along TP in one region"):
        piper.compile(job(strategy, TIED), device="cpu")


@pytest.mark.slow
def test_a_tied_weight_under_a_shard_with_weights_behind_one_of_the_sequence_is_refused() -> None:
    """Its slice is taken before the sequence is sharded: along CP all devices have the same gradient."""
    with pytest.raises(piper.ScheduleError, match=r"embedding\.weight is a sum along CP in one region"):
        piper.compile(job(MIXES[REVERSED], TIED), device="cpu")


def test_values_are_gathered_where_they_leave_for_another_mesh() -> None:
    """The last collective of the first stage is the gather; its backward takes each device's slice."""
    program = piper.compile(job(MIXES["context, then tensor"]), device="cpu", captured=captured())
    first = [chunk for chunk in program.outline.chunks if dict(chunk.tags)["PP"] == 0 and chunk.collective]
    assert first[-1].collective is not None
    assert (first[-1].collective.op, first[-1].collective.back) == ("all_gather", "slice")


def test_values_are_sliced_where_they_arrive_from_another_mesh() -> None:
    """The first collective of the second stage takes each device's slice; its backward is the gather."""
    program = piper.compile(job(MIXES["tensor, then context"]), device="cpu", captured=captured())
    second = [chunk for chunk in program.outline.chunks if dict(chunk.tags)["PP"] == 1 and chunk.collective]
    assert second[0].collective is not None
    assert (second[0].collective.op, second[0].collective.back) == ("slice", "all_gather")


class ReadTwice(nn.Module):
    """Both stages read the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(32, 16), nn.Embedding(32, 16)
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            h = self.first(tokens)
        with piper.annotate("PP"):
            logits: Tensor = self.head(self.up(h + self.second(tokens)).relu())
        return logits


def test_regions_on_one_set_of_devices_load_a_field_whole_and_in_slices() -> None:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    weights = {"second|up|head": 0}
    strategy = [context(0, LEFT), shard(at(PP=1), LEFT, axis="TP", weights=weights)]
    program = piper.compile(replace(job(strategy), model=ReadTwice, loss=loss), device="cpu")
    report = check(program, launch_inline, data())
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [piper.schedules.zbv, piper.schedules.interleaved_1f1b])
def test_stages_with_different_axes_on_each_device(schedule: Callable[[int, int], list[Directive]]) -> None:
    v_shaped = schedule is piper.schedules.zbv
    third, fourth = (RIGHT, LEFT) if v_shaped else (LEFT, RIGHT)
    strategy = [
        *(context(0, LEFT), tensor(1, RIGHT, between=1), replicate(at(PP=2), third, zero=1)),
        *(context(3, fourth), piper.split(at(), parts=4), *schedule(2, 4)),
    ]
    program = piper.compile(job(strategy, replace(CONFIG, layers=4, stages=4)), device="cpu")
    report = check(program, launch_inline, data())
    assert report.ok, report
