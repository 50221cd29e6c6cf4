"""The forms of what a loss returns: a mean, or a sum with its weight, and metrics; or a prediction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from piper.errors import CaptureError
from piper.ir.numbers import is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a loss returned."""

    values: tuple[object, ...]  # the loss, or its sum and its weight
    metrics: Mapping[str, tuple[object, object]] = field(default_factory=dict)  # the sum and weight of each
    predicts: bool = False  # the value is a prediction


class Prediction:
    """A forward in place of a loss: its result has a row for each sample, and is kept, not summed."""

    def __init__(self, forward: Callable[[nn.Module, dict[str, Tensor]], object]) -> None:
        self.forward = forward

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> object:
        result = self.forward(model, batch)
        return result.clone() if isinstance(result, Tensor) else result  # it may be a field of the batch


def check_prediction(returned: object, samples: int) -> None:
    """Refuse a prediction that is not one tensor with a row for each sample."""
    value = returned.meta["example_value"] if isinstance(returned, fx.Node) else returned
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
        raise CaptureError(
            "a prediction is not a tensor with a row for each sample",
            by="predict",
            facts={"got": got, "samples": f"{samples} in a slice"},
            hint='return one tensor: run.predict(batch, lambda model, batch: model(batch["x"]))',
        )


def returned_by_loss(returned: object) -> Returned:
    """Read what a loss returned: `loss`, `(sum, weight)`, `(loss, metrics)` or `((sum, weight), metrics)`."""
    metrics: Mapping[str, tuple[object, object]] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        metrics = checked_metrics(returned[1])
        returned = returned[0]
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) not in (1, 2) or not all(map(is_tensor, values)):
        kinds = ", ".join("a tensor" if is_tensor(value) else type(value).__name__ for value in values)
        got = f"({kinds})" if isinstance(returned, tuple) else kinds
        raise not_a_loss(f"it returns {got}")
    return Returned(values=values, metrics=metrics)


def checked_metrics(metrics: Mapping[object, object]) -> dict[str, tuple[object, object]]:
    """Return the metrics of a loss. Raise a CaptureError where one has no name, no sum or no weight."""
    checked: dict[str, tuple[object, object]] = {}
    for name, pair in metrics.items():
        numbers = pair if isinstance(pair, tuple) and len(pair) == 2 else ()
        if not isinstance(name, str) or not numbers or not all(is_tensor(n) or is_number(n) for n in numbers):
            kinds = ", ".join(type(number).__name__ for number in numbers)
            raise CaptureError(
                f"the metric {name!r} is not a pair (sum, weight)",
                by="loss",
                facts={"got": f"({kinds})" if numbers else type(pair).__name__},
                hint='return the metrics behind the loss: return loss, {"accuracy": (correct, number)}',
            )
        checked[name] = numbers
    return checked


def not_a_loss(got: str) -> CaptureError:
    """Return the error of a loss that returns something else."""
    hint = "return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors"
    return CaptureError("the loss is not a loss", by="loss", facts={"got": got}, hint=hint)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, or the node of one in a captured graph."""
    return isinstance(value, fx.Node | Tensor)
