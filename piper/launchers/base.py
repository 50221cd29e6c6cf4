"""The results of steps, evaluations and loads, and values by their names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
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
    path: str = ""  # of the checkpoint


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
    state: dict[str, Tensor] = {}
    for parameter in outline.parameters:
        for name in (parameter.name, *parameter.aliases):
            state[name] = values[parameter.name]
    for buffer in outline.buffers:
        state |= dict.fromkeys(buffer.saved_as, values[buffer.name]) if buffer.persistent else {}
    return state
