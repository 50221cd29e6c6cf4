"""Callbacks: what happens after a step, an evaluation, a checkpoint, and at the end of a training.

A job has callbacks, `piper.Job(callbacks=[...])`. `run.train()` and `piper train` call them in the driver, in
the order of the list.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, cast

from piper.errors import ConfigError
from piper.process.usercode import calling_line

if TYPE_CHECKING:  # a recipe pays for torch when its model does, not when it imports us
    from torch import Tensor
    from torch.optim import Optimizer

AVERAGE = "piper_average"  # the key of a parameter's average among what the optimizer keeps for it


class Numbers(Protocol):
    """The numbers of an evaluation."""

    @property
    def loss(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class StepNumbers(Numbers, Protocol):
    """The numbers of a step."""

    @property
    def grad_norm(self) -> float: ...


class Running(Protocol):
    """The run that a callback gets."""

    folder: Path  # of `piper train`, and of a resumed run; else the current one

    def stop(self) -> None: ...  # ends the training after this step
    def resize(self, devices: int) -> None: ...  # goes on with so many devices, if the job is elastic
    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None: ...
    def state_dict(self) -> "dict[str, Tensor]": ...
    def optimizer_state(self, key: str) -> "dict[str, Tensor]": ...


class RunWithExperts(Protocol):
    """What a run can do with experts that have clones."""

    routed: Mapping[str, Sequence[int]]  # rows of each expert in the last step, by regions that can move

    def balance_experts(
        self, costs: Path | str = "h100", rows: Mapping[str, Sequence[int]] | None = None, least: float = 0.02
    ) -> float: ...
    def expert_places(self) -> dict[str, list[list[list[int]]]]: ...
    def restore_experts(self, places: Mapping[str, Sequence[Sequence[Sequence[int]]]]) -> None: ...


class Callback:
    """A callback that does nothing. Override what you need. Under torchrun it runs on rank 0."""

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        """Run after a step. Steps count from 1."""

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        """Run after an evaluation."""

    def on_save(self, run: Running, step: int, path: Path) -> None:
        """Run after a checkpoint of the job is on its way to the disk."""

    def on_end(self, run: Running, step: int) -> None:
        """Run at the end of a training, also after `run.stop()`."""

    def on_load(self, run: Running) -> None:
        """Run after a checkpoint is loaded, and with it the state of this callback."""

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint keeps of this callback: numbers, texts and lists of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with what a checkpoint kept of this callback."""

    def wrap_optimizer(
        self, make: "Callable[[Iterable[Tensor]], Optimizer]"
    ) -> "Callable[[Iterable[Tensor]], Optimizer]":
        """Return the function that makes the job's optimizer, changed where this callback needs it.

        A job that `dataclasses.replace` makes from another one calls this again with the earlier result.
        """
        return make


def named_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by the names that checkpoints have for them: the class, and a number if several."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        taken = sum(other == name or other.startswith(f"{name}.") for other in found)
        found[f"{name}.{taken}" if taken else name] = callback
    return found


class Best(Callback):
    """Keeps the best value of an evaluation so far: of `loss`, or of one of the metrics."""

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        if mode not in ("min", "max"):
            refuse(f"there is no mode {mode!r}", "mode is one of min, max")
        self.metric, self.mode = metric, mode
        self.value: float | None = None
        self.step = 0

    def improves(self, step: int, result: Numbers, least: float = 0.0) -> bool:
        """Take note of an evaluation. Return whether it is better than the best by more than `least`."""
        values = {**result.metrics, "loss": result.loss}
        if self.metric not in values:
            refuse(f"there is no metric {self.metric!r}", f"an evaluation has {', '.join(values)}")
        value, sign = values[self.metric], 1.0 if self.mode == "min" else -1.0
        if math.isnan(value) or (self.value is not None and sign * (self.value - value) <= least):
            return False
        self.value, self.step = value, step
        return True

    def state_dict(self) -> dict[str, object]:
        return {"best": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.step = state["best"], state["step"]


class EarlyStopping(Best):
    """Stops the training after `patience` evaluations without an improvement.

    metric: `loss`, or one of the metrics. least: what an improvement must exceed.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        least: float = 0.0,
    ) -> None:
        super().__init__(metric, mode)
        if patience < 1:
            refuse(f"patience={patience}", "wait for at least 1 evaluation")
        self.patience, self.least, self.waited = patience, least, 0

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        self.waited = 0 if self.improves(step, result, self.least) else self.waited + 1
        if self.waited >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"]


class BestCheckpoint(Best):
    """Saves a checkpoint after each evaluation that is the best so far, in place of the one before it.

    folder: a relative one is in the run's folder, as that of `piper.Checkpoint` is.
    """

    def __init__(
        self, folder: Path | str, metric: str = "loss", *, mode: Literal["min", "max"] = "min"
    ) -> None:
        super().__init__(metric, mode)
        self.folder = Path(folder)

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        if self.improves(step, result):
            run.save(run.folder / self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """A function that makes an optimizer, which then averages the parameters after each of its steps."""

    make: "Callable[[Iterable[Tensor]], Optimizer]"
    decay: float

    def __call__(self, params: "Iterable[Tensor]") -> "Optimizer":
        optimizer = self.make(params)
        optimizer.register_step_post_hook(self.average)
        return optimizer

    def average(self, optimizer: "Optimizer", args: object, kwargs: object) -> None:
        """Move the average of each parameter that was just updated towards it."""
        import torch

        averages, values = [], []
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is None:
                continue
            kept = optimizer.state[parameter]
            if AVERAGE not in kept:
                kept[AVERAGE] = parameter.detach().clone()
            else:
                averages.append(kept[AVERAGE])
                values.append(parameter.detach())
        if averages:
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)


class EMA(Callback):
    """Keeps an exponential moving average of the parameters.

    It begins with the parameters after the first step. It is state of the optimizer: sharded like the
    parameters, counted in plans, and saved in checkpoints.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0.0 < decay < 1.0:
            refuse(f"decay={decay!r}", "choose a decay between 0 and 1, such as 0.999")
        self.decay = decay

    def wrap_optimizer(
        self, make: "Callable[[Iterable[Tensor]], Optimizer]"
    ) -> "Callable[[Iterable[Tensor]], Optimizer]":
        plain = make.make if isinstance(make, Averaged) else make  # of an earlier job: its decay may differ
        return Averaged(make=plain, decay=self.decay)

    def averages(self, run: Running) -> "dict[str, Tensor]":
        """Return the model's state with the averages in place of the trained parameters, in full."""
        found = run.optimizer_state(AVERAGE)
        state = run.state_dict()
        if not found:
            refuse("there is no average yet", "train a step first")
        return {name: found.get(name, value) for name, value in state.items()}


class MoveExperts(Callback):
    """Moves experts after every so many steps to where the simulator says that a step is shortest.

    The strategy has room for clones: `shard(..., clones=n)`. Rows are counted over these steps.
    costs: the name or the file of a cluster, or the file of measured costs. least: by which part a step must
    become shorter.
    """

    def __init__(self, every: int = 10, costs: Path | str = "h100", *, least: float = 0.02) -> None:
        if every < 1:
            refuse(f"every={every}", "move experts after 1 step or more")
        self.every, self.costs, self.least = every, costs, least
        self.rows: dict[str, list[int]] = {}
        self.places: dict[str, list[list[list[int]]]] = {}  # where experts are computed, by region

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        routing = cast(RunWithExperts, run)
        for region, rows in routing.routed.items():
            self.rows[region] = [*map(sum, zip(rows, self.rows.get(region, [0] * len(rows)), strict=True))]
        if step % self.every == 0:
            routing.balance_experts(self.costs, self.rows, self.least)
            self.rows, self.places = {}, routing.expert_places()

    def on_load(self, run: Running) -> None:
        cast(RunWithExperts, run).restore_experts(self.places)

    def state_dict(self) -> dict[str, object]:
        return {"rows": self.rows, "places": self.places}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows, self.places = state["rows"], state["places"]


class Logger(Callback):
    """Writes the numbers of steps and evaluations. Override `write` and `close`."""

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        self.write("train", step, {"loss": result.loss, "grad_norm": result.grad_norm, **result.metrics})

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        self.write("evaluate", step, {"loss": result.loss, **result.metrics})

    def on_end(self, run: Running, step: int) -> None:
        self.close()

    def write(self, part: str, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step ("train") or of an evaluation ("evaluate")."""

    def close(self) -> None:
        """End the log; what is written later begins it again."""


class TensorBoard(Logger):
    """Writes the numbers of steps and evaluations for TensorBoard.

    A run that resumes takes the place of what an earlier one wrote of the same steps.
    """

    def __init__(self, folder: Path | str = "tensorboard") -> None:
        self.folder = Path(folder)
        self.writer: Any = None  # torch's own

    def write(self, part: str, step: int, numbers: Mapping[str, float]) -> None:
        if self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                refuse("TensorBoard is not installed", "install it: pip install tensorboard")
            self.writer = SummaryWriter(str(self.folder), purge_step=step)
        for name, value in numbers.items():
            self.writer.add_scalar(f"{part}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WeightsAndBiases(Logger):
    """Logs the numbers of steps and evaluations to Weights & Biases. options: those of `wandb.init`."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.run: Any = None  # wandb's own

    def write(self, part: str, step: int, numbers: Mapping[str, float]) -> None:
        if self.run is None:
            try:
                import wandb  # type: ignore[import-not-found]
            except ImportError:
                refuse("wandb is not installed", "install it: pip install wandb")
            self.run = wandb.init(**self.options)
        self.run.log({f"{part}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


def refuse(what: str, hint: str) -> NoReturn:
    """Raise a ConfigError that names the user's line."""
    line = calling_line()
    raise ConfigError(what, by=f"callbacks ({line})" if line else "callbacks", hint=hint)
