"""The outcome of a run, and what it is made of."""

from dataclasses import dataclass
from pathlib import Path

from piper.train.measure import Measure


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
