"""Groups that train apart and average have the numbers of the same algorithm in plain PyTorch."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

import piper
from piper import at, average, protect, remat, replicate, shard, split
from piper.check.check import Report, check
from piper.plan.text import read_plans, show_plans
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.runtime.worker import Options
from piper.workers.local import LocalWorkerGroup
from tests.runtime.averaging import (
    Net,
    assert_same,
    data,
    heavy_ball,
    job,
    mean_loss,
    nesterov,
    plain_groups,
    train,
    weighted_loss,
)

PIPELINE = [
    replicate(at(PP=0), devices=[0, 1]),
    replicate(at(PP=1), devices=[2, 3]),
    split(at(), axis="MB", parts=2),
    *piper.schedules.one_f_one_b(stages=2, microbatches=2),
    average(at(), across=[0, 1], every=2),
]
TENSOR = [
    shard(at(), devices=[0, 1, 2, 3], ways=2, axis="TP", weights={"first": 0, "second": 1}),
    average(at(), across=[0, 2], every=2),
]


WITHIN = [  # two groups that train apart, each of two groups that shard the same
    replicate(at(), devices=range(8), zero=3, within=2, optimizer_within=4),
    average(at(), across=[0, 4], every=2),
]


def zero(level: int) -> list[piper.Directive]:
    return [
        average(at(), across=[0, 2], every=3),
        replicate(at(), devices=[0, 1, 2, 3], zero=level),
        split(at(), parts=2),
    ]


@pytest.mark.parametrize(
    ("strategy", "groups", "every"),
    [
        ([replicate(at(), devices=[0, 1]), average(at(), across=[0, 1])], 2, 1),
        ([replicate(at(), devices=[0, 1, 2, 3]), average(at(), across=[0, 1, 2, 3], every=2)], 4, 2),
        (zero(1), 2, 3),
        (zero(2), 2, 3),
        (zero(3), 2, 3),
        (WITHIN, 2, 2),
        (PIPELINE, 2, 2),
        ([*PIPELINE[:3], *piper.schedules.zero_bubble(2, 2), PIPELINE[-1]], 2, 2),
        ([*zero(3), remat(at(), 0.5)], 2, 3),
        (TENSOR, 2, 2),
    ],
    ids=["pair", "four", "zero1", "zero2", "zero3", "within", "pipeline", "zero bubble", "remat", "tensor"],
)
def test_groups_have_the_numbers_of_plain_pytorch(
    strategy: list[piper.Directive], groups: int, every: int
) -> None:
    losses, models = plain_groups(groups, every, 7)
    assert_same(train(piper.compile(job(*strategy)), 7), losses, models[0])


@pytest.mark.parametrize("level", [0, 1, 3])
def test_an_outer_optimizer_has_the_numbers_of_diloco(level: int) -> None:
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    strategy = [*zero(level)[1:], average(at(), across=[0, 2], every=3, outer=outer)]
    losses, models = plain_groups(2, 3, 10, outer=nesterov)
    assert_same(train(piper.compile(job(*strategy)), 10), losses, models[0])


FRAGMENTS = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
STREAMED = average(at(), across=[0, 1], every=4, outer={"lr": 0.7, "momentum": 0.5}, fragments=2)


def test_fragments_average_in_different_steps() -> None:
    losses, models = plain_groups(2, 4, 11, outer=heavy_ball, fragments=FRAGMENTS)
    assert_same(train(piper.compile(job(*PIPELINE[:-1], STREAMED)), 11), losses, models[0])


def test_the_outer_optimizer_resumes_where_it_was(tmp_path: Path) -> None:
    losses, models = plain_groups(2, 4, 11, outer=heavy_ball, fragments=FRAGMENTS)
    program = piper.compile(job(*PIPELINE[:-1], STREAMED))
    before, _ = train(program, 5, save=tmp_path / "saved")
    again = train(program, 6, on="local", resume=tmp_path / "saved")
    assert_same((before + again[0], again[1]), losses, models[0])


def test_groups_begin_with_the_values_of_a_job_without_any(tmp_path: Path) -> None:
    train(piper.compile(job()), 0, save=tmp_path / "start")
    losses, models = plain_groups(2, 4, 6, outer=heavy_ball, fragments=FRAGMENTS)
    program = piper.compile(job(*PIPELINE[:-1], STREAMED))
    assert_same(train(program, 6, resume=tmp_path / "start"), losses, models[0])


@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize("outer", [None, {"lr": 0.7, "momentum": 0.5}], ids=["average", "outer"])
def test_an_average_that_travels_behind_other_steps_is_merged_later(
    outer: dict[str, float] | None, overlap: int
) -> None:
    behind = average(at(), across=[0, 2], every=4, outer=outer, fragments=2, overlap=overlap, keep=0.25)
    optimizer = None if outer is None else heavy_ball
    losses, models = plain_groups(2, 4, 12, outer=optimizer, fragments=FRAGMENTS, overlap=overlap, keep=0.25)
    assert_same(train(piper.compile(job(*zero(3)[1:], behind)), 12), losses, models[0])


def test_an_average_that_travels_is_saved(tmp_path: Path) -> None:
    behind = average(at(), across=[0, 2], every=4, overlap=3)
    losses, models = plain_groups(2, 4, 10, overlap=3, keep=0.5)
    program = piper.compile(job(*zero(1)[1:], behind))
    before, _ = train(program, 5, save=tmp_path / "saved")
    again = train(program, 5, on="local", resume=tmp_path / "saved")
    assert_same((before + again[0], again[1]), losses, models[0])


def test_weights_and_clipping_are_of_each_group() -> None:
    strategy = zero(1)
    program = piper.compile(job(*strategy, loss=weighted_loss, clip=0.05))
    losses, models = plain_groups(2, 3, 7, loss=weighted_loss, clip=0.05)
    assert_same(train(program, 7), losses, models[0])


def test_a_group_resumes_from_its_own_values(tmp_path: Path) -> None:
    losses, models = plain_groups(2, 3, 8)
    program = piper.compile(job(*zero(3)))
    before, _ = train(program, 4, on="local", save=tmp_path / "saved")
    again = train(piper.compile(job(*zero(0))), 4, resume=tmp_path / "saved")
    assert_same((before + again[0], again[1]), losses, models[0])


def test_a_job_without_groups_begins_with_the_values_of_the_first(tmp_path: Path) -> None:
    program = piper.compile(job(*zero(0)))
    _, state = train(program, 4, save=tmp_path / "saved")
    with piper.launch(piper.compile(job()), on="inline", resume=tmp_path / "saved") as run:
        assert all(value.equal(state[name]) for name, value in run.state_dict().items())


def test_an_evaluation_is_the_mean_over_groups() -> None:
    _, models = plain_groups(2, 3, 2)
    batch = job().data()[0]  # type: ignore[index]
    each = [
        mean_loss(model, {k: v[8 * g : 8 * g + 8] for k, v in batch.items()})
        for g, model in enumerate(models)
    ]
    with piper.launch(piper.compile(job(*zero(2))), on="inline") as run:
        for _ in run.train(2):
            pass
        assert run.evaluate([batch]).loss == pytest.approx((each[0] + each[1]).item() / 2, abs=1e-9)


def test_plans_of_groups_have_a_text_form() -> None:
    plans = piper.compile(job(*TENSOR)).plans
    assert read_plans(show_plans(plans)) == plans


def checked(given: piper.Job) -> Report:
    program = piper.compile(given, device="cpu")
    return check(program, launch_inline, [*given.data()][:6], options=Options())


def test_check_compares_groups_with_plain_pytorch() -> None:
    behind = average(at(), across=[0, 2], every=3, outer={"lr": 0.7, "momentum": 0.5}, overlap=1)
    report = checked(job(*zero(1)[1:], behind, loss=weighted_loss, clip=0.05))
    assert report.ok and report.max_param_diff < 1e-12
    assert report.verdict == "The same numbers as 2 groups that train apart in plain PyTorch."


def test_check_gives_each_group_its_samples_of_an_uneven_batch() -> None:
    cut = [
        {name: field[:n] for name, field in batch.items()}
        for batch, n in zip(data(), (16, 14, 10), strict=False)
    ]
    report = checked(replace(job(*zero(1)[1:2], average(at(), across=[0, 2], every=2)), data=lambda: cut))
    assert report.ok, report.verdict


def test_check_notices_groups_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.runtime.group_means.step_by", lambda outer, common, momentum, mean: None)
    strategy = [*zero(1)[1:], average(at(), across=[0, 2], every=3, outer={"lr": 0.7})]
    assert "Not the same numbers: step 2" in checked(job(*strategy)).verdict


def test_check_says_that_it_cannot_draw_the_numbers_of_groups() -> None:
    class Dropped(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.dropout(x, 0.3, self.training))

    given = replace(job(replicate(at(), devices=[0, 1]), average(at(), across=[0, 1])), model=Dropped)
    assert checked(given).verdict == (
        "Not the same numbers: the random numbers cannot be drawn in plain PyTorch: "
        "groups that train apart draw numbers of their own"
    )


@pytest.mark.parametrize(
    "copies",
    [pytest.param(None, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow), 1],
    ids=["between steps", "protect", "mirror"],
)
def test_a_killed_worker_of_a_group_is_replaced(copies: int | None) -> None:
    """The outer optimizer's state and what travels come back with the rest."""
    copied = [] if copies is None else [protect(at(), copies=copies, apart="device")]
    outer = {"lr": 0.7, "momentum": 0.5}
    behind = average(at(), across=[0, 2], every=4, outer=outer, overlap=2, keep=0.25)
    program = piper.compile(job(*zero(1)[1:], *copied, behind))
    losses, models = plain_groups(2, 4, 10, outer=heavy_ball, overlap=2, keep=0.25)
    got = []
    with recovering(program, "local", Options(), retries=3) as run:
        for number, result in enumerate(run.train(10)):
            got.append(result.loss)
            if number == 4:  # an average is under way
                group = cast(LocalWorkerGroup, run.session.group)
                os.kill(group.processes[3], signal.SIGKILL)
        assert_same((got, run.state_dict()), losses, models[0])
