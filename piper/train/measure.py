"""The measures of a training step, the learning rate of the next, and the outcome of a run in words."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from torch import Tensor

from piper.checkpoint.json_state import decode
from piper.checkpoint.metadata import Trainer
from piper.job import Job
from piper.plan.bucket import Bucket
from piper.runtime.trainers import Sizes, advance, empty_optimizer, make_scheduler
from piper.simulate.throughput import TOKENS
from piper.view.provenance import METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One step, as `metrics.jsonl` has it. Steps count from 1: step k is the k-th update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float | None  # None: the batch has no tokens
    samples_per_s: float
    step_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returns behind the loss

    def as_line(self) -> dict[str, object]:
        """Return the line of `metrics.jsonl`, which has metrics only where the loss returns some."""
        line = asdict(self)
        return line if self.metrics else {key: value for key, value in line.items() if key != "metrics"}


Reporter = Callable[[Measure], None]


class Rate:
    """The learning rate of each step, from an optimizer like the workers' that has nothing to train."""

    def __init__(
        self,
        job: Job,
        buckets: Iterable[Bucket],
        resumed: Trainer | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """Build the schedule. resumed: the state of a checkpoint to continue from. None: a new run.

        sizes: of all parameters that plain PyTorch gives to the optimizer. None: of those in the buckets.
        """
        self._job = job
        self._optimizer = empty_optimizer(job.optimizer, [bucket.update for bucket in buckets], sizes)
        self._scheduler = None
        if self._optimizer is None:
            return
        if job.scheduler is not None:
            self._scheduler = make_scheduler(job.scheduler, self._optimizer)
        if resumed is not None and resumed.optimizer is not None:
            groups = cast("list[dict[str, object]]", decode(resumed.groups))
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(saved)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(cast("dict[str, object]", decode(resumed.schedule)))

    @property
    def now(self) -> float:
        """Return the learning rate of the next step, of the first group of parameters."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    def set_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group, as `run.optimizer[group][key] = value` does on the workers."""
        if self._optimizer is not None:
            self._optimizer.param_groups[group][key] = value

    def advance(self, step: int) -> None:
        """Go on by a step, as workers do at its end."""
        if self._scheduler is not None and self._job.scheduler is not None:
            advance(self._scheduler, self._job.scheduler, step)


def tokens_in(batch: Mapping[str, Tensor]) -> int | None:
    """Count the tokens of a batch. None: it has none."""
    return next((batch[name].numel() for name in TOKENS if name in batch), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    folder: Path
    done: int
    steps: int
    saved: bool  # the last step is in a checkpoint
    seconds: float  # of steps
    first: Measure | None  # step of this run, after a resume too; none, if there was nothing left to do
    last: Measure | None
    preempted: bool = False  # stopped by SIGTERM

    @property
    def stopped(self) -> bool:
        """Return whether the run was stopped before its last step."""
        return self.done < self.steps


class RunSummary:
    """Remembers the first and the last step, and how long all took."""

    def __init__(self) -> None:
        self.first: Measure | None = None
        self.last: Measure | None = None
        self.seconds = 0.0

    def __call__(self, measure: Measure) -> None:
        self.first = self.first or measure
        self.last = measure
        self.seconds += measure.step_s


def ending(outcome: Outcome, program: str = "piper") -> str:
    """Return the closing message of a run that reached its last step. program: how the user calls Piper."""
    folder, first, last = outcome.folder, outcome.first, outcome.last
    if first is None or last is None:
        return f"The run is at step {outcome.done} already: --steps asks for more"
    fall = 100 * (1 - last.loss / first.loss) if first.loss else 0.0
    steps = last.step - first.step + 1
    rows = [
        f"Trained {steps} steps in {outcome.seconds:.0f} s: "
        f"loss {first.loss:.4f} -> {last.loss:.4f} ({abs(fall):.0f} % {'lower' if fall >= 0 else 'higher'})",
        f"  run      {folder}",
        f"  metrics  {folder / METRICS}",
        f"  plan     {folder / 'plan.txt'}",
        f"  look     {program} view {folder}",
    ]
    return "\n".join(rows)


def stopping(outcome: Outcome, again: str) -> str:
    """Return the message of a run that was stopped; `again`: the command that goes on."""
    where = f"{'preempted' if outcome.preempted else 'stopped'} after step {outcome.done} of {outcome.steps}"
    if outcome.saved:
        return f"{where}; go on with: {again}"
    return f"{where}; nothing was saved, because the job has no checkpoint"
