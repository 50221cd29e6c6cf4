"""What every launcher shares: what a running job offers, and what a step gives back."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from torch import Tensor

from piper.errors import WorkerError
from piper.ir.chunk import Outline
from piper.plan.plan import Plans
from piper.runtime.record import Clock, Recording
from piper.runtime.setup import ProgramLike
from piper.runtime.trail import Mark
from piper.runtime.worker import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step tells: the loss of its batch, and the norm of its gradient before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a run goes on from: the step, and what the data had to say."""

    step: int
    data: object = None


class Trains(ABC):
    """A job that takes its steps from its own data."""

    program: ProgramLike
    batches: Iterator[Mapping[str, Tensor]] | None = None  # begun with the first call

    @abstractmethod
    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's data, as many steps as it says or as asked; another call goes on from there."""
        if self.batches is None:
            self.batches = iter(self.program.job.data())
        for batch in islice(self.batches, self.program.job.steps if steps is None else steps):
            yield self.step(batch)


class Run(Protocol):
    """A job that is running."""

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's own data, step by step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, by fully qualified name."""

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients in full, before clipping, where they are kept."""

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """What every chunk returned in the last step, by device, where it is kept."""

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """When the instructions of the recorded steps ran, by device, where that is recorded."""

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint: the model, the optimizer, the scheduler, the step, and what the data says.

        wait: False returns once the state is copied, and training goes on while it is written; an error then
        comes with the next `save`, `settle` or `close`.
        keep: drop all but so many of the newest `step-*` checkpoints beside it, when it is complete.
        """

    def load(self, path: Path | str) -> Resumed:
        """Go on from a checkpoint, whatever strategy it was saved under."""

    def settle(self) -> None:
        """Wait until what is being saved is complete."""

    def close(self) -> None:
        """End every worker. Again: nothing."""


def streams_of(plans: Plans) -> int:
    """The most streams that any device has."""
    return max(len({ins.stream for ins in plan.instrs}) for plan in plans)


def ended() -> WorkerError:
    """The error of a run that is used after its end."""
    return WorkerError("the workers have ended", by="run", hint="launch the program again")


def result_of(plans: Plans, sums: Sums) -> StepResult:
    """A step's result from the sums over all devices."""
    norm = math.sqrt(sums.squares)
    if plans.weighted:
        if not sums.weight:  # nothing counts in this batch: as 0 / 0 in PyTorch
            return StepResult(loss=math.nan, grad_norm=math.nan)
        return StepResult(loss=sums.loss / sums.weight, grad_norm=norm / sums.weight)
    return StepResult(loss=sums.loss * plans.seed, grad_norm=norm)


def state_by_name(outline: Outline, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A full state under every name a model's own state_dict has: those of tied tensors too."""
    found: dict[str, Tensor] = {}
    for parameter in outline.parameters:
        for name in (parameter.name, *parameter.aliases):
            found[name] = values[parameter.name]
    for buffer in outline.buffers:
        found |= dict.fromkeys(buffer.saved_as, values[buffer.name]) if buffer.persistent else {}
    return found
