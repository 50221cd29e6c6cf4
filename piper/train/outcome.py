"""The outcome of a run, what it is made of, and the closing message: the result, and where files are."""

from dataclasses import dataclass
from pathlib import Path

from piper.train.measure import Measure
from piper.train.run_folder import METRICS


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
