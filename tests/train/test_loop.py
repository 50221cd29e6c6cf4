"""The loop by itself: when it saves, when it stops, and what it tells first."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from piper.checkpoint.json_state import encode
from piper.checkpoint.metadata import Trainer
from piper.errors import ConfigError
from piper.job import Job
from piper.plan.plan import Bucket, Piece
from piper.train.loop import Course, SavePolicy, train
from piper.train.measure import Measure, Rate, counted, unit_of

WEIGHT = Piece(name="w", shape=(2, 2), offset=0)
BUCKETS = [
    Bucket(
        name="all",
        pieces=(WEIGHT,),
        devices=(0,),
        groups=((0,),),
        chunks=("all",),
        dtype="float32",
        itemsize=4,
    )
]
JOB = Job(model=torch.nn.Identity, loss=lambda model, batch: batch["x"].sum(), data=list)


@dataclass
class Result:
    loss: float
    grad_norm: float = 1.0


class Counting:
    """Steps that only count; the loss of a step is its number."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, batch: Mapping[str, Tensor]) -> Result:
        self.steps += 1
        return Result(float(self.steps))


def batches() -> Iterator[Mapping[str, Tensor]]:
    while True:
        yield {"x": torch.zeros(4)}


def course(
    events: list[str], steps: int, done: int = 0, every: int = 2, stop_at: int | None = None
) -> Course:
    return Course(
        done=done,
        steps=steps,
        tell=lambda measure: events.append(f"told {measure.step}"),
        saves=SavePolicy(every=every, save=lambda step, last: events.append(f"saved {step}{' last' * last}")),
        stopping=lambda: stop_at is not None and f"told {stop_at}" in events,
    )


def test_a_step_is_told_of_before_it_is_saved_and_the_last_always_is() -> None:
    events: list[str] = []
    assert train(Counting(), batches(), Rate(JOB, BUCKETS), course(events, 5)) == 5
    assert events == [
        "told 1",
        "told 2",
        "saved 2",
        "told 3",
        "told 4",
        "saved 4",
        "told 5",
        "saved 5 last",
    ]


def test_a_request_to_stop_is_heard_after_the_step() -> None:
    events: list[str] = []
    assert train(Counting(), batches(), Rate(JOB, BUCKETS), course(events, 9, stop_at=3)) == 3
    assert events[-2:] == ["told 3", "saved 3 last"]


def test_a_run_goes_on_from_the_step_after() -> None:
    events: list[str] = []
    assert train(Counting(), batches(), Rate(JOB, BUCKETS), course(events, 8, done=7)) == 8
    assert events == ["told 8", "saved 8 last"]
    assert train(Counting(), batches(), Rate(JOB, BUCKETS), course(events, 8, done=8)) == 8


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_numbers_that_are_none_are_neither_told_nor_saved(loss: float, norm: float) -> None:
    class Bad(Counting):
        def step(self, batch: Mapping[str, Tensor]) -> Result:
            return Result(loss, norm)

    events: list[str] = []
    with pytest.raises(ConfigError) as error:
        train(Bad(), batches(), Rate(JOB, BUCKETS), course(events, 5, every=1))
    assert str(error.value) == (
        "step 1: the numbers are not finite any more\n"
        f"  loss:     {loss:g}\n"
        f"  gradient: norm {norm:g}\n"
        "  hint:     run with --detect-nan to name the first chunk that made it"
    )
    assert not events


def test_a_rate_is_the_workers_rate() -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    job = Job(model=JOB.model, loss=JOB.loss, data=list, scheduler=scheduler)
    rate, seen = Rate(job, BUCKETS), []
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
    rate = Rate(job, BUCKETS, resumed)
    assert rate.now == 4.0
    rate.advance(4)
    assert rate.now == 2.0


def test_what_is_counted() -> None:
    assert counted({"tokens": torch.zeros(4, 8), "labels": torch.zeros(4, 8)}) == 32
    assert counted({"x": torch.zeros(4, 8)}) == 4
    assert unit_of(["labels", "input_ids"]) == "tokens" and unit_of({"x": 0}) == "samples"


def test_a_measure_is_a_line_of_metrics() -> None:
    assert Measure.__slots__ == ("step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s")
