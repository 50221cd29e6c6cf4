"""Trains a model in plain PyTorch: one device, the whole batch, autograd and the optimizer, no Piper.

Tests compare a distributed run with this. The helper imports nothing of `piper`, so that a mistake there
cannot agree with itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What plain training gave: the loss of each step, the first step's gradients, the final state."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(
    model_fn: Callable[[], nn.Module],
    loss_fn: Loss,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    microbatches: Sequence[Sequence[int]] = (),
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd,
) -> Trained:
    """Train in fp64 on whole batches.

    microbatches: for a forward that changes buffers, the samples that run together, one microbatch after
    another; the loss is then the mean of their losses.
    """
    torch.manual_seed(seed)
    model = model_fn().double()
    stepper = optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        stepper.zero_grad()
        double = {k: field.double() if field.is_floating_point() else field for k, field in batch.items()}
        rows = microbatches or [range(len(next(iter(double.values()))))]
        parts = [{name: field[list(some)] for name, field in double.items()} for some in rows]
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            result = loss_fn(model, part)
            total = total + (result[0] / result[1] if isinstance(result, tuple) else result) / len(parts)
        total.backward()
        losses.append(float(total.detach()))
        if not gradients:
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        stepper.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Trained(losses=losses, gradients=gradients, state=state)


def largest_difference(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two states that must have the same names."""
    assert set(wanted) == set(got), set(wanted) ^ set(got)
    worst = 0.0
    for name, value in wanted.items():
        assert value.shape == got[name].shape, name
        if value.numel():
            difference = (value - got[name].to(value.dtype)).abs().max()
            assert not difference.isnan(), name
            worst = max(worst, float(difference))
    return worst
