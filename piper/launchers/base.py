"""The parts that every launcher shares: the interface of a running job, and the result of a step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast, overload

from torch import Tensor

from piper.callbacks import Callback, Running, named_callbacks
from piper.errors import ConfigError, WorkerError
from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: the loss of its batch, the norm of its gradient before clipping, and metrics."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returns behind the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation: weighted means over all its batches."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    batches: int = 0

    def _repr_html_(self) -> str:
        numbers = {"loss": self.loss, **self.metrics, "samples": self.samples}
        rows = "".join(f"<tr><td>{name}</td><td>{value:g}</td></tr>" for name, value in numbers.items())
        return f"<table>{rows}</table>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The point from which a loaded run continues: its step, and the saved state of the data."""

    step: int
    data: object = None
    callbacks: Mapping[str, object] = field(default_factory=dict)  # the saved states of the job's callbacks


class Trains(ABC):
    """A run that can train on the data of its job."""

    program: ProgramLike
    batches: Iterator[Mapping[str, Tensor]] | None = None  # begun with the first call
    done = 0  # steps that `train` has trained, those before a loaded checkpoint included
    stopping = False  # a callback has asked to stop
    drives = True  # this process writes what callbacks write

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End every worker. Idempotent."""

    @abstractmethod
    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Mapping[str, Tensor]] | None = None) -> EvaluationResult:
        """Evaluate on global batches, by default those of the job's `evaluate`."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's data, by default for the job's steps. A second call continues from there.

        Where the data ends, the next epoch begins with a new call of `data`. The job's `evaluate` and
        callbacks run as well. It ends early where a callback calls `stop`.
        """
        if self.batches is None:
            self.batches = epochs(self.program.job.data)
        self.stopping = False
        last = self.done + (self.program.job.steps if steps is None else steps)
        for batch in islice(self.batches, last - self.done):
            step = self.done + 1  # a run that recovers counts by itself
            result = self.step(batch)
            self.after_step(step, result, last)
            yield result
            if self.stopping:
                break
        self.after_training(self.done)

    @property
    def optimizer(self) -> "OptimizerGroups":
        """Return the options of the optimizer's groups, to read and to set."""
        return OptimizerGroups(self)

    @abstractmethod
    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of each group of parameters."""

    @abstractmethod
    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""

    def stop(self) -> None:
        """End the training after this step. For callbacks."""
        self.stopping = True

    def resize(self, devices: int) -> None:
        """Go on with another number of devices. For callbacks of an elastic job."""
        raise ConfigError(
            f"this run cannot go on with {devices} devices: their number is fixed",
            by="resize",
            hint="let piper train recover (--retries) and make the job elastic: piper.Job(elastic=(2, 4))",
        )

    def after_step(self, step: int, result: StepResult, last: int) -> EvaluationResult | None:
        """Evaluate where it is due, and call the callbacks. Return the result of an evaluation."""
        self.done = step
        for callback in self._callbacks():
            callback.on_step(cast(Running, self), step, result)
        asked = self.program.job.evaluate
        if asked is None or (step % asked.every and step != last):
            return None
        found = self.evaluate()
        for callback in self._callbacks():
            callback.on_evaluate(cast(Running, self), step, found)
        return found

    def after_saving(self, step: int, path: Path) -> None:
        """Call the callbacks after a checkpoint."""
        for callback in self._callbacks():
            callback.on_save(cast(Running, self), step, path)

    def after_training(self, step: int) -> None:
        """Call the callbacks at the end of the training."""
        for callback in self._callbacks():
            callback.on_end(cast(Running, self), step)

    def resumed(self, found: Resumed) -> Resumed:
        """Continue with the steps and the states of the callbacks that a checkpoint has."""
        self.done = found.step
        for name, callback in named_callbacks(self.program.job.callbacks).items():
            if name in found.callbacks:
                callback.load_state_dict(cast("Mapping[str, object]", found.callbacks[name]))
        return found

    def _callbacks(self) -> Iterator[Callback]:
        """Yield the callbacks that run in this process."""
        for callback in self.program.job.callbacks:
            if self.drives or callback.everywhere:
                yield callback

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return False


class Run(Protocol):
    """The interface of a running job. It ends with its `with` block, with `close`, or when it is not used."""

    @property
    def optimizer(self) -> "OptimizerGroups":
        """Return the options of the optimizer's groups: `run.optimizer[0]["lr"] = 1e-4`."""

    def optimizer_groups(self) -> list[dict[str, object]]:
        """Return the options of each group of parameters."""

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of parameters on all devices."""

    def resize(self, devices: int) -> None:
        """Go on with so many devices, if the job is elastic."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def stopping(self) -> bool:
        """Return whether a callback has asked to stop."""

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""

    def train(self, steps: int | None = None) -> Iterator[StepResult]:
        """Train on the job's own data, step by step."""

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]] | None = None) -> EvaluationResult:
        """Evaluate on global batches, by default those of the job's `evaluate`; nothing is trained."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, by fully qualified name."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients in full, before clipping; `keep_gradients` must be on."""

    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        """Return what every chunk returned in the last step, by device; `keep_outputs` must be on."""

    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
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

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        """Return in full what the optimizer keeps for each parameter under a key, such as `exp_avg`."""

    def stop(self) -> None:
        """End `train` after this step. For callbacks."""

    def after_step(self, step: int, result: StepResult, last: int) -> EvaluationResult | None:
        """Evaluate where it is due and call the callbacks, in a loop that is not `train`."""

    def after_saving(self, step: int, path: Path) -> None:
        """Call the callbacks after a checkpoint, in a loop that is not `train`."""

    def after_training(self, step: int) -> None:
        """Call the callbacks at the end of the training, in a loop that is not `train`."""

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""

    def close(self) -> None:
        """End every worker. Idempotent."""


class OptimizerGroups(Sequence["OptimizerGroup"]):
    """The groups of a run's optimizer. `run.optimizer[0]["lr"]` is the learning rate of the first."""

    def __init__(self, run: Trains) -> None:
        self.run = run

    @overload
    def __getitem__(self, index: int) -> "OptimizerGroup": ...
    @overload
    def __getitem__(self, index: slice) -> "list[OptimizerGroup]": ...
    def __getitem__(self, index: int | slice) -> "OptimizerGroup | list[OptimizerGroup]":
        found = [OptimizerGroup(self.run, number) for number in range(len(self))]
        return found[index]

    def __len__(self) -> int:
        return len(self.run.optimizer_groups())

    def __repr__(self) -> str:
        return repr(self.run.optimizer_groups())


class OptimizerGroup(Mapping[str, object]):
    """The options of one group of parameters. Those that are numbers can be set, between steps."""

    def __init__(self, run: Trains, number: int) -> None:
        self.run, self.number = run, number

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  an optimizer may have any options
        return self.run.optimizer_groups()[self.number][key]

    def __setitem__(self, key: str, value: float) -> None:
        known = self.run.optimizer_groups()[self.number]
        if key not in known or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"the option {key!r} of an optimizer cannot be set to {value!r}",
                by="run.optimizer",
                facts={"options": ", ".join(known)},
                hint='set one of these to a number: run.optimizer[0]["lr"] = 1e-4',
            )
        self.run.set_optimizer_option(self.number, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.optimizer_groups()[self.number])

    def __len__(self) -> int:
        return len(self.run.optimizer_groups()[self.number])

    def __repr__(self) -> str:
        return repr(self.run.optimizer_groups()[self.number])


class Readable(Protocol):
    """An object that can be waited for."""

    def fileno(self) -> int: ...


def epochs(data: Callable[[], Iterable[Mapping[str, Tensor]]]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the batches of one call of `data` after another, until a call returns none."""
    some = True
    while some:
        some = False
        for batch in data():
            some = True
            yield batch


def streams_of(plans: Plans) -> int:
    """Return the largest number of streams of any device."""
    return max(len({ins.stream for ins in plan.instrs}) for plan in plans)


def ended() -> WorkerError:
    """Return the error of a run that is used after its end."""
    return WorkerError("the workers have ended", by="run", hint="launch the program again")


def result_of(plans: Plans, outline: CapturedModel, sums: Sums) -> StepResult:
    """Return the result of a step from the sums over all devices."""
    norm, metrics = math.sqrt(sums.squares), metrics_of(outline, sums)
    if plans.weighted:
        if not sums.weight:  # nothing counts in this batch: as 0 / 0 in PyTorch
            return StepResult(loss=math.nan, grad_norm=math.nan, metrics=metrics)
        loss, norm = sums.loss / sums.weight, norm / sums.weight
        return StepResult(loss=loss, grad_norm=norm, metrics=metrics)
    return StepResult(loss=sums.loss * plans.seed, grad_norm=norm, metrics=metrics)


def metrics_of(outline: CapturedModel, sums: Sums) -> dict[str, float]:
    """Return the metrics of a step by name: each a sum divided by its weight."""
    pairs = zip(sums.metrics[::2], sums.metrics[1::2], strict=True)
    return {name: ratio(*pair) for name, pair in zip(outline.metric_names, pairs, strict=True)}


def ratio(total: float, weight: float) -> float:
    """Return a sum divided by its weight; NaN where nothing counts, as 0 / 0 in PyTorch."""
    return total / weight if weight else math.nan


def state_by_name(outline: CapturedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a full state under every name of the model's own state_dict, tied tensors included."""
    found: dict[str, Tensor] = {}
    for parameter in outline.parameters:
        for name in (parameter.name, *parameter.aliases):
            found[name] = values[parameter.name]
    for buffer in outline.buffers:
        found |= dict.fromkeys(buffer.saved_as, values[buffer.name]) if buffer.persistent else {}
    return found


def unread_values(program: ProgramLike, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the initial values of parameters and buffers that no device holds. They never change."""
    held = {piece.name for bucket in program.plans.buckets.values() for piece in bucket.pieces}
    residents = (slot for plan in program.plans for slot in plan.residents)
    held |= {slot.owner for slot in residents if slot.kind == "buffer"}
    return {name: value.clone() for name, value in values.items() if name not in held}
