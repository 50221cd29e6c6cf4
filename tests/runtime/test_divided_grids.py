"""Regions whose devices are arranged in different ways: whole values pass between them, never slices."""

import pytest
import torch

import piper
from piper.check.check import check
from piper.models import decoder
from piper.run.launch import launch_inline

CONFIG = decoder.Config(vocab=96, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=64, stages=2)
WEIGHTS = {
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}
FIELDS = {"tokens": 1, "labels": 1}


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.randint(0, 96, (4, 16), generator=generator) for name in FIELDS}]


def tensor(stage: int, devices: list[int]) -> piper.Directive:
    return piper.shard(piper.at(PP=stage), devices, ways=2, axis="TP", weights=WEIGHTS, between=1)


def context(stage: int, devices: list[int]) -> piper.Directive:
    return piper.shard(piper.at(PP=stage), devices, ways=2, axis="CP", batch=FIELDS)


def same_numbers(strategy: list[piper.Directive]) -> None:
    job = piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.loss,
        data=data,
        strategy=strategy,
        precision="fp64",
    )
    report = check(piper.compile(job), launch_inline, data())
    assert report.ok, report


def refusal(strategy: list[piper.Directive]) -> str:
    job = piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.loss,
        data=data,
        strategy=strategy,
        precision="fp64",
    )
    with pytest.raises(piper.ScheduleError) as caught:
        piper.compile(job)
    return str(caught.value).split(": ", 1)[1]


def test_axes_in_another_order() -> None:
    left, right = [0, 1, 2, 3], [4, 5, 6, 7]
    text = refusal([tensor(0, left), context(0, left), context(1, right), tensor(1, right)])
    assert text == (
        "two regions are sharded along different axes, or in another order\n"
        "  PP=0: TP then CP\n"
        "  PP=1: CP then TP\n"
        "  hint: shard all such regions along the same axes, in the same order of directives"
    )


def test_a_divided_region_before_one_that_is_not() -> None:
    same_numbers([tensor(0, [0, 1]), piper.place(piper.at(PP=1), [2])])
