"""Adam and AdamW in one kernel for each parameter that is split in halves: see `piper.runtime.bucket_state`.

Chunks compute in bf16, and the optimizer works in float32. torch's fused kernels need memory for all bits of
a parameter, and write the divided gradients back. With gradients that were summed in float32 that moves 50
bytes for each parameter where 28 are enough.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from piper.runtime.trainers import hooked

BLOCK = 2048  # elements
ALIGNED = 16  # bytes, and elements a multiple of it, so that one form of the kernel does for most parameters
READ = (torch.bfloat16, torch.float16, torch.float32)  # types of gradients
Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


def _adam(  # type: ignore[no-untyped-def]  # Triton reads the types of arguments when it is called
    high,
    low,
    gradient,
    first,
    second,
    step,
    rate,
    divisor,
    skip,
    count,
    share1,  # of the new gradient in the mean: 1 - beta1, of which float32 has more digits than of beta1
    share2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    apart: tl.constexpr,  # the decay of AdamW, not through the gradient
    negated: tl.constexpr,
    divided: tl.constexpr,
    skipped: tl.constexpr,  # nothing changes where `skip` is above 0
    size: tl.constexpr,
) -> None:
    """Update one block of a parameter, whose bits are in two tensors, and its moments."""
    taken = tl.load(step).to(tl.float64)
    lr = tl.load(rate).to(tl.float32)
    # In float64: after one step of beta = 0.999 little is left of 1 - beta in float32.
    correction1 = (1.0 - tl.exp(taken * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt(1.0 - tl.exp(taken * log_beta2)).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = places < count
    bits = (tl.load(high + places, inside).to(tl.int32) << 16) + tl.load(low + places, inside).to(tl.int32)
    value = bits.to(tl.float32, bitcast=True)
    grad = tl.load(gradient + places, inside).to(tl.float32)
    if divided:
        grad = grad / tl.load(divisor)
    if negated:
        grad = -grad
    if apart:
        value -= lr * decay * value
    else:
        grad += decay * value
    mean = tl.load(first + places, inside)
    mean += share1 * (grad - mean)
    square = tl.load(second + places, inside)
    square += share2 * (grad * grad - square)
    value -= (lr / correction1) * mean / (tl.sqrt(square) / correction2 + eps)
    if skipped:
        inside = inside & (tl.load(skip) == 0)
    tl.store(first + places, mean, inside)
    tl.store(second + places, square, inside)
    bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
    rounded = (bits + 0x8000) >> 16
    tl.store(high + places, rounded.to(tl.int16), inside)
    tl.store(low + places, (bits - (rounded << 16)).to(tl.int16), inside)


# Where single numbers lie is not worth a form of its own.
NUMBERS = ["step", "rate", "divisor", "skip"]
_aligned = triton.jit(do_not_specialize_on_alignment=NUMBERS)(_adam)
_anywhere = triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["high", "low", "gradient", "first", "second", *NUMBERS],
)(_adam)


class SplitAdam:
    """Steps the parameters of an optimizer of torch's that are split, by one kernel each."""

    def __init__(
        self, optimizer: Optimizer, high: Mapping[Tensor, Tensor], low: Mapping[Tensor, Tensor]
    ) -> None:
        """Keep an optimizer. high, low: the halves of what it updates."""
        self.optimizer, self.high, self.low = optimizer, high, low
        self.groups = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def step(self, pairs: Sequence[Pair], divisor: Tensor | None, skip: Tensor | None = None) -> list[Pair]:
        """Update parameters by their gradients, unless `skip` is above 0; return the pairs for torch."""
        # torch takes the first step of a parameter, in which it makes the optimizer's state.
        if not suits(self.optimizer):
            return [*pairs]
        divisor = None if divisor is None else divisor.float()
        skip = None if skip is None else skip.clamp(max=1).float()
        taken = [pair for pair in pairs if pair[0] in self.low and pair[1].dtype in READ]
        ready = [pair for pair in taken if self._is_ready(*pair)]
        if ready:
            steps = [self.optimizer.state[parameter]["step"] for parameter, _ in ready]
            if skip is None:
                torch._foreach_add_(steps, 1)
            else:
                torch._foreach_add_(steps, [1 - skip] * len(steps))
            rates = [_rate(group["lr"], ready) for group in self.optimizer.param_groups]
            for parameter, gradient in ready:
                self._launch(parameter, gradient, rates[self.groups[parameter]], divisor, skip)
        done = {parameter for parameter, _ in ready}
        return [pair for pair in pairs if pair[0] not in done]

    def _is_ready(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether the optimizer has state for a parameter, and all lies as the kernel needs it."""
        state = self.optimizer.state.get(parameter, {})
        if "exp_avg" not in state:
            return False
        read = (self.high[parameter], self.low[parameter], gradient, state["exp_avg"], state["exp_avg_sq"])
        return all(tensor.is_cuda and tensor.is_contiguous() for tensor in read)

    def _launch(
        self, parameter: Tensor, gradient: Tensor, rate: Tensor, divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        group, state = self.optimizer.param_groups[self.groups[parameter]], self.optimizer.state[parameter]
        halves = self.high[parameter].view(torch.int16), self.low[parameter]
        tensors = *halves, gradient, state["exp_avg"], state["exp_avg_sq"]
        count, (beta1, beta2) = gradient.numel(), group["betas"]
        aligned = count % ALIGNED == 0 and all(each.data_ptr() % ALIGNED == 0 for each in tensors)
        (_aligned if aligned else _anywhere)[triton.cdiv(count, BLOCK),](
            *tensors,
            state["step"],
            rate,
            rate if divisor is None else divisor,
            rate if skip is None else skip,
            count,
            1 - beta1,
            1 - beta2,
            math.log(beta1),
            math.log(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            apart=type(self.optimizer) is AdamW or bool(group.get("decoupled_weight_decay")),
            negated=bool(group["maximize"]),
            divided=divisor is not None,
            skipped=skip is not None,
            size=BLOCK,
        )


def suits(optimizer: Optimizer) -> bool:
    """Return whether an optimizer does what the kernel does, and nothing else at its steps."""
    return (
        type(optimizer) in (Adam, AdamW)
        and not hooked(optimizer)
        and all(
            group["fused"]
            and not group["amsgrad"]
            and not group["differentiable"]
            and all(isinstance(beta, float) and 0 < beta < 1 for beta in group["betas"])
            for group in optimizer.param_groups
        )
    )


def _rate(rate: float | Tensor, pairs: Sequence[Pair]) -> Tensor:
    """Return a learning rate on the device; a graph has it there already."""
    device = pairs[0][1].device
    return rate if isinstance(rate, Tensor) and rate.is_cuda else torch.full((), float(rate), device=device)
