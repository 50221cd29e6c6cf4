"""The training loop: it ends after the last step, on a request to stop, or on a loss that is not finite."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from torch import Tensor

from piper.data.feed import Feed
from piper.errors import ConfigError
from piper.job import Batch
from piper.runtime.batch import BatchSpec, check_batch
from piper.train.measure import Measure, Rate, counted
from piper.usercode import named

Reporter = Callable[[Measure], None]


class Result(Protocol):
    """The result of a step."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...


class Steps(Protocol):
    """A running job that can train a step."""

    def step(self, batch: Mapping[str, Tensor]) -> Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """When to save: every so many steps, at the end, and when asked to stop."""

    every: int
    save: Callable[[int, bool], None]  # given the steps done, and whether they are the last: then it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The steps to train, after `done` up to `steps`, and the callbacks of each step."""

    done: int
    steps: int
    tell: Reporter
    saves: SavePolicy | None = None
    stopping: Callable[[], bool] = lambda: False
    culprit: Callable[[], str | None] | None = None  # the first result of the last step that is not finite
    after: Callable[[int, Result], None] = lambda step, result: None  # evaluates and runs callbacks
    complete: Callable[[], None] = lambda: None  # all of a step is done


def train(run: Steps, batches: Iterator[Batch], rate: Rate, course: Course) -> int:
    """Train, and return how many steps are done: fewer than asked for after a request to stop.

    A step is reported before it is saved: a run that ends between the two repeats and reports it again.
    """
    for step in range(course.done + 1, course.steps + 1):
        lr = rate.now
        rate.advance(step)  # first: a schedule that is too short is named here, not by a worker
        began = perf_counter()
        batch = next(batches)
        result = run.step(batch)
        seconds = perf_counter() - began
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise not_a_number(step, result, course)
        course.tell(
            Measure(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                tokens_per_s=counted(batch) / seconds,
                step_s=seconds,
            )
        )
        course.after(step, result)
        last = step == course.steps or course.stopping()
        if course.saves is not None and (last or step % course.saves.every == 0):
            course.saves.save(step, last)
        course.complete()
        if last:
            return step
    return course.done


def checked(feed: Feed, wanted: BatchSpec) -> Iterator[Batch]:
    """Yield the batches of a job's data; one unlike the compiled batch is refused with the data's line."""
    for batch in feed:
        check_batch(batch, wanted, by=f"{named('data', feed.make)}, step {feed.step}")
        yield batch


def not_a_number(step: int, result: Result, course: Course) -> ConfigError:
    """Return the error of a step whose loss or gradient is not finite."""
    facts = {"loss": f"{result.loss:g}", "gradient": f"norm {result.grad_norm:g}"}
    first = course.culprit() if course.culprit is not None else None
    if first is not None:
        facts["first"] = first
    hint = "lower the learning rate or clip the gradient; --resume goes on from the last checkpoint"
    if course.culprit is None:
        hint = "run with --detect-nan to name the first chunk that made it"
    return ConfigError("the numbers are not finite any more", by=f"step {step}", facts=facts, hint=hint)
