"""The parts that every launcher shares: the interface of a running job, and the result of a step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from torch import Tensor

from piper.errors import WorkerError
from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
from piper.runtime.debug.output_recorder import Mark
from piper.runtime.debug.profiler import Clock, Recording
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: the loss of its batch, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The point from which a loaded run continues: its step, and the saved state of the data."""

    step: int
    data: object = None


class Trains(ABC):
    """A run that can train on the data of its job."""

    program: ProgramLike
    batches: Iterator[Mapping[str, Tensor]] | None = None  # begun with the first call

    @abstractmethod
    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's data, by default for the job's steps. A second call continues from there."""
        if self.batches is None:
            self.batches = iter(self.program.job.data())
        for batch in islice(self.batches, self.program.job.steps if steps is None else steps):
            yield self.step(batch)

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return False


class Run(Protocol):
    """The interface of a running job."""

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's own data, step by step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, by fully qualified name."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients in full, before clipping; `keep_gradients` must be on."""

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """Return what every chunk returned in the last step, by device; `keep_outputs` must be on."""

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """Return when the instructions of the recorded steps ran, by device; `profile` must be on."""

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint: the model, the optimizer, the scheduler, the step and the state of the data.

        wait: False returns once the state is copied, and training goes on while it is written; an error then
        comes with the next `save`, `settle` or `close`.
        keep: how many of the newest `step-*` checkpoints in its folder stay once it is complete. None: all.
        """

    def load(self, path: Path | str) -> Resumed:
        """Continue from a checkpoint, whatever strategy it was saved under."""

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""

    def close(self) -> None:
        """End every worker. Idempotent."""


def streams_of(plans: Plans) -> int:
    """Return the largest number of streams of any device."""
    return max(len({ins.stream for ins in plan.instrs}) for plan in plans)


def ended() -> WorkerError:
    """Return the error of a run that is used after its end."""
    return WorkerError("the workers have ended", by="run", hint="launch the program again")


def result_of(plans: Plans, sums: Sums) -> StepResult:
    """Return the result of a step from the sums over all devices."""
    norm = math.sqrt(sums.squares)
    if plans.weighted:
        if not sums.weight:  # nothing counts in this batch: as 0 / 0 in PyTorch
            return StepResult(loss=math.nan, grad_norm=math.nan)
        return StepResult(loss=sums.loss / sums.weight, grad_norm=norm / sums.weight)
    return StepResult(loss=sums.loss * plans.seed, grad_norm=norm)


def state_by_name(outline: CapturedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a full state under every name of the model's own state_dict, tied tensors included."""
    found: dict[str, Tensor] = {}
    for parameter in outline.parameters:
        for name in (parameter.name, *parameter.aliases):
            found[name] = values[parameter.name]
    for buffer in outline.buffers:
        found |= dict.fromkeys(buffer.saved_as, values[buffer.name]) if buffer.persistent else {}
    return found
