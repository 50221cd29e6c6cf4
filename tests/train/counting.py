"""A run that only counts its steps, for tests of the loop by itself."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

import piper
from piper.callbacks import Callback, Running, StepNumbers
from piper.errors import ConfigError
from piper.run.run import Run
from piper.run.session import Sessions
from piper.runtime.batch import FLOATING, BatchSpec
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.results import Resumed, StepResult


class Tells(Callback):
    """Writes down the steps that it sees."""

    def __init__(self, events: list[str], stop_at: int | None = None) -> None:
        self.events, self.stop_at = events, stop_at

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        self.events.append(f"told {step}")
        if step == self.stop_at:
            run.stop()


class CountingSessions(Sessions):
    """Sessions without workers: a step is only counted, and what is saved is written down."""

    def __init__(self, program: ProgramLike, events: list[str]) -> None:
        super().__init__(program, Options(), cast(Starter, SimpleNamespace(close=lambda: None)))
        self.events = events
        self.begun: ConfigError | None = None  # why a save cannot begin
        self.finished: ConfigError | None = None  # why the save before was not finished

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        self.done += 1
        return StepResult(loss=float(self.done), grad_norm=1.0)

    def try_write(self, folder: Path, data: object) -> None:
        """Do nothing: there is no state."""

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        if self.begun is not None:
            raise self.begun
        self.events.append(f"saved {int(Path(path).name.removeprefix('step-'))}{' last' * wait} keep {keep}")

    def settle(self) -> None:
        error, self.finished = self.finished, None
        if error is not None:
            raise error

    def read(self, path: Path | str) -> Resumed:
        self.done = 7
        return Resumed(step=7, path=str(path))


class Counting(Run):
    """A run that only counts; the loss of a step is its number."""

    wanted = BatchSpec(shapes={"x": (4,)}, types={"x": FLOATING})
    sessions: CountingSessions

    def __init__(self, every: int = 2, steps: int = 100, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        job = piper.Job(
            model=torch.nn.Identity,
            loss=lambda model, batch: batch["x"].sum(),
            data=lambda: [{"x": torch.zeros(4)}] * 3,
            checkpoint=piper.Checkpoint(folder="checkpoints", every=every),
            callbacks=[Tells(self.events, stop_at)],
            steps=steps,
        )
        super().__init__(CountingSessions(cast(ProgramLike, SimpleNamespace(job=job)), self.events))
