"""The results of steps, evaluations and loads, as the answers of workers give them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel
from piper.plan.plan import Plans
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Sums

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step: the loss of its batch, the norm of its gradient before clipping, and metrics."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returns behind the loss
    repeated: bool = False  # rows exceeded their blocks, so the step was run again with as many as there were


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation: weighted means over all its batches."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The point from which a loaded run continues: its step, and the saved state of the data."""

    step: int
    data: object = None
    callbacks: Mapping[str, object] = field(default_factory=dict)  # the saved states of the job's callbacks
    path: str = ""  # of the checkpoint


def result_of(plans: Plans, outline: CapturedModel, sums: Sums) -> StepResult:
    """Return the result of a step from the sums over all devices."""
    norm = math.sqrt(sums["squares"])
    return StepResult(
        loss=ratio(sums["loss"], sums["weight"]) if plans.weighted else sums["loss"] * plans.seed,
        grad_norm=ratio(norm, sums["weight"]) if plans.weighted else norm,
        metrics=metrics_of(*metric_sums(plans, outline, sums)),
        repeated=sums.repeated,
    )


def sums_over_groups(plans: Plans, answers: Mapping[int, Sums]) -> Sums:
    """Return the sums of a step from those that devices answer: over all groups that train apart.

    The squared norm is the mean of theirs, each scaled by the weight of its group.
    """
    if plans.averaging is None:
        return next(iter(answers.values()))
    groups = {plans.place_in_group(device)[0]: sums for device, sums in answers.items()}
    each = [groups[group] for group in sorted(groups)]  # all, but where a device runs alone
    numbers: dict[str, tuple[float, ...]] = {
        name: tuple(map(sum, zip(*(sums.numbers[name] for sums in each), strict=True))) for name in plans.sums
    }
    (weight,), (loss,), count = numbers["weight"], numbers["loss"], len(each)
    scale = [weight / sums["weight"] if plans.weighted and sums["weight"] else 1.0 for sums in each]
    squares = sum(sums["squares"] * by**2 for sums, by in zip(each, scale, strict=True)) / count
    return Sums(
        numbers={**numbers, "squares": (squares,), "loss": (loss if plans.weighted else loss / count,)}
    )


def rows_by_expert(plans: Plans, answers: Mapping[int, Sums]) -> dict[str, tuple[int, ...]]:
    """Return the rows of each expert in a step, by chunks of experts that have clones: over all groups."""
    rows: dict[str, tuple[int, ...]] = {}
    for region, bucket in plans.cloned.items():
        counts = [answers[group[0]].rows[region] for group in bucket.inside if group[0] in answers]
        rows[region] = tuple(map(sum, zip(*counts, strict=True)))
    return rows


def metric_sums(plans: Plans, outline: CapturedModel, sums: Sums) -> tuple[tuple[str, ...], list[float]]:
    """Return the names of the metrics of the loss and of directives, and the sum and the weight of each."""
    values = [value for name in ("metrics", *plans.metrics) for value in sums.numbers.get(name, ())]
    return (*outline.metric_names, *plans.metrics), values


def metrics_of(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return metrics by name: each a sum divided by its weight. sums: the sum and the weight of each."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    return {name: ratio(*pair) for name, pair in zip(names, pairs, strict=True)}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Samples of a batch that run together."""

    batch: Batch
    samples: int
    copies: int = 1  # of each sample in `batch`, where fewer samples are left than there are slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The sums of an evaluation so far."""

    names: tuple[str, ...] = ()  # of the metrics
    sums: tuple[float, ...] = ()  # the sum and the weight of the loss and of each metric
    samples: int = 0
    batches: int = 0

    def add(self, program: ProgramLike, piece: SampleGroup, sums: Sums) -> "Means":
        """Return these sums with those of one piece. A mean loss counts by the samples of the piece."""
        plans = program.plans
        if plans.weighted:
            loss, weight = sums["loss"] / piece.copies, sums["weight"] / piece.copies
        else:
            loss, weight = sums["loss"] * plans.seed * piece.samples, float(piece.samples)
        names, values = metric_sums(plans, program.outline, sums)
        added = [loss, weight, *(value / piece.copies for value in values)]
        before = self.sums or (0.0,) * len(added)
        return replace(
            self,
            names=names,
            sums=tuple(a + b for a, b in zip(before, added, strict=True)),
            samples=self.samples + piece.samples,
        )

    def result(self) -> EvaluationResult:
        """Return the weighted means of the loss and of the metrics. Refuse those of no batch."""
        if not self.batches:
            raise ConfigError(
                "there is no batch to evaluate on", by="evaluate", hint="give at least one batch"
            )
        return EvaluationResult(
            loss=ratio(*self.sums[:2]),
            metrics=metrics_of(self.names, self.sums[2:]),
            samples=self.samples,
            batches=self.batches,
        )
