"""The evaluations of a run: `evaluations.jsonl`, and a line on the console."""

from dataclasses import asdict
from pathlib import Path

from piper.launchers.base import EvaluationResult
from piper.train.run_folder import MetricsFile

EVALUATIONS = "evaluations.jsonl"


class Evaluations:
    """`evaluations.jsonl`: one object for each evaluation. The file is made with the first one."""

    def __init__(self, folder: Path, done: int) -> None:
        self.folder, self.done = folder, done
        self.lines = MetricsFile(folder, EVALUATIONS, done) if (folder / EVALUATIONS).exists() else None

    def write(self, step: int, result: EvaluationResult) -> None:
        """Write the result of an evaluation after a step."""
        if self.lines is None:
            self.lines = MetricsFile(self.folder, EVALUATIONS, self.done)
        self.lines.write({"step": step, **asdict(result)})

    def __enter__(self) -> "Evaluations":
        return self

    def __exit__(self, *_: object) -> None:
        if self.lines is not None:
            self.lines.file.close()


def evaluation_line(step: int, result: EvaluationResult) -> str:
    """Format the result of an evaluation in one line."""
    metrics = "".join(f"   {name} {value:.4f}" for name, value in result.metrics.items())
    return f"evaluation after step {step}   loss {result.loss:.4f}{metrics}   {result.samples} samples"
