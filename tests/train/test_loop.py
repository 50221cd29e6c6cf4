"""The loop by itself: when it saves, when it stops, and what it tells first."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from piper.checkpoint.json_state import encode
from piper.checkpoint.metadata import Trainer
from piper.errors import ConfigError
from piper.job import Job
from piper.run.run import Run
from piper.runtime.setup import ProgramLike
from piper.train.measure import Measure, Rate, tokens_in
from piper.workers.results import StepResult
from tests.train.counting import Counting

SIZES = {"w": (2, 2)}
JOB = Job(model=torch.nn.Identity, loss=lambda model, batch: batch["x"].sum(), data=list)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def losses(run: Run, steps: int | None = None) -> list[float]:
    return [result.loss for result in run.train(steps)]


def test_a_step_is_told_of_before_it_is_saved_and_the_last_always_is() -> None:
    run = Counting(steps=5)
    assert losses(run) == [1, 2, 3, 4, 5]
    assert run.events == [
        "told 1",
        "told 2",
        "saved 2 keep 2",
        "told 3",
        "told 4",
        "saved 4 keep 2",
        "told 5",
        "saved 5 last keep 2",
    ]


def test_a_request_to_stop_is_heard_after_the_step() -> None:
    run = Counting(stop_at=3)
    assert losses(run) == [1, 2, 3]
    assert run.events[-2:] == ["told 3", "saved 3 last keep 2"]
    assert losses(run, 2) == [4, 5], "a second call goes on"


def test_a_run_goes_on_from_the_step_after(caplog: pytest.LogCaptureFixture) -> None:
    run = Counting(steps=8)
    assert run.load("somewhere").step == 7
    assert losses(run) == [8]
    assert run.events == ["told 8", "saved 8 last keep 2"]
    assert losses(run) == [], "up to the steps of the job"
    assert caplog.messages == ["The run is at step 8 of 8 already: run.train(n) trains n more"]
    assert losses(run, 2) == [9, 10], "more than that"


def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    run = Counting(steps=5)
    for result in run.train():
        if result.loss == 2:
            break
    assert run.events[-1] == "saved 2 keep 2", "all of a step is done before its result is given"
    assert losses(run) == [3, 4, 5]
    assert run.feed.step == 5


def test_an_own_loop_ends_where_a_callback_stops_it() -> None:
    run = Counting(stop_at=2)
    for batch in run.batches():
        result = run.step(batch)
        run.after_step(run.done, result, 5)
    assert run.done == 2


def test_data_that_ends_early_says_so() -> None:
    run = Counting()
    once = iter([{"x": torch.zeros(4)}] * 2)
    run.sessions.program = cast(ProgramLike, SimpleNamespace(job=replace(run.program.job, data=lambda: once)))
    with pytest.raises(ConfigError, match=r"data\(\) ended after 2 batches"):
        losses(run, 5)
    assert run.done == 2


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_numbers_that_are_none_are_neither_told_nor_saved(loss: float, norm: float) -> None:
    class Bad(Counting):
        def step(self, batch: Mapping[str, Tensor]) -> StepResult:
            self.sessions.done += 1
            return StepResult(loss=loss, grad_norm=norm)

    run = Bad(every=1)
    with pytest.raises(ConfigError) as error:
        losses(run)
    assert str(error.value) == (
        "step 1: the numbers are not finite any more\n"
        f"  loss:     {loss:g}\n"
        f"  gradient: norm {norm:g}\n"
        "  hint:     name the first chunk that made it: --detect-nan, or "
        "piper.launch(program, keep_outputs=True)"
    )
    assert not run.events


def test_a_rate_is_the_workers_rate() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    job = Job(model=JOB.model, loss=JOB.loss, data=list, scheduler=scheduler)
    rate, seen = Rate(job, SIZES), []
    for step in range(1, 6):
        seen.append(rate.now)
        rate.advance(step)
    assert seen == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]


def test_a_resumed_rate_is_that_of_the_checkpoint() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    job = Job(model=JOB.model, loss=JOB.loss, data=list, scheduler=scheduler)
    kept = scheduler(torch.optim.SGD([torch.zeros(1)], lr=8.0))
    with warnings.catch_warnings(action="ignore"):
        for _ in range(3):
            kept.step()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in kept.optimizer.param_groups]
    resumed = Trainer(
        optimizer="AdamW",
        groups=encode(groups, "groups"),
        scheduler="StepLR",
        schedule=encode(kept.state_dict(), "schedule"),
    )
    rate = Rate(job, SIZES, resumed)
    assert rate.now == 4.0
    rate.advance(4)
    assert rate.now == 2.0


def test_tokens_are_counted_where_there_are_any() -> None:
    assert tokens_in({"tokens": torch.zeros(4, 8), "labels": torch.zeros(4, 8)}) == 32
    assert tokens_in({"labels": torch.zeros(4, 8), "input_ids": torch.zeros(4, 6)}) == 24
    assert tokens_in({"x": torch.zeros(4, 8)}) is None


def test_a_measure_is_a_line_of_metrics() -> None:
    numbers = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens_per_s": None,
        "samples_per_s": 8.0,
        "step_s": 0.5,
    }
    plain = Measure(step=3, **numbers)  # type: ignore[arg-type]
    assert list(plain.as_line().items()) == [("step", 3), *numbers.items()]
    assert replace(plain, metrics={"accuracy": 0.25}).as_line() == {
        "step": 3,
        **numbers,
        "metrics": {"accuracy": 0.25},
    }
