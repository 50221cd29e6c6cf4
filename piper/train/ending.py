"""The closing message of a run: its result, and where its files are."""

from piper.train.outcome import Outcome
from piper.train.run_folder import METRICS


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
