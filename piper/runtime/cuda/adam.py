"""Adam and AdamW in one kernel for each large parameter, which casts as well.

Chunks compute in bf16, and the optimizer works in float32. torch's fused kernels write the divided gradients
back, and the updated parameters are read again to cast them. With gradients that were summed in float32 that
moves 38 bytes for each parameter where 30 are enough. Gradients in bf16 are written as float32 first, which
moves 44 bytes where 28 are enough.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

LARGE = 2**21  # elements that take the GPU as long as the host takes to start a kernel
BLOCK = 2048  # elements
ALIGNED = 16  # bytes, and elements a multiple of it, so that one form of the kernel does for all parameters
READ = (torch.bfloat16, torch.float16, torch.float32)  # types of gradients
Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


# Where single numbers lie is not worth a form of its own.
@triton.jit(do_not_specialize_on_alignment=["step", "rate", "divisor", "skip"])  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]  # Triton reads the types of arguments when it is called
    parameter,
    gradient,
    first,
    second,
    copy,
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
    """Update one block of a parameter and its moments, and write it in the type of its copy as well."""
    taken = tl.load(step).to(tl.float64)
    lr = tl.load(rate).to(tl.float32)
    # In float64: after one step of beta = 0.999 little is left of 1 - beta in float32.
    correction1 = (1.0 - tl.exp(taken * log_beta1)).to(tl.float32)
    correction2 = tl.sqrt(1.0 - tl.exp(taken * log_beta2)).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = places < count
    value = tl.load(parameter + places, inside)
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
    tl.store(parameter + places, value, inside)
    tl.store(copy + places, value.to(copy.dtype.element_ty), inside)


class CastingAdam:
    """Steps the large parameters of an optimizer of torch's by one kernel each."""

    def __init__(self, optimizer: Optimizer, copies: Mapping[Tensor, Tensor]) -> None:
        """Keep an optimizer. copies: what chunks compute with, by what it updates."""
        self.optimizer, self.copies = optimizer, copies
        self.groups = {
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self.compiled = False

    def step(self, pairs: Sequence[Pair], divisor: Tensor | None, skip: Tensor | None = None) -> list[Pair]:
        """Update large parameters by their gradients. Return the pairs of those that torch has to update.

        torch takes the first step of a parameter, in which it makes the optimizer's state.
        divisor: of the gradients, on the device. skip: change nothing where it is above 0.
        """
        if not suits(self.optimizer):
            return [*pairs]
        divisor = None if divisor is None else divisor.float()
        skip = None if skip is None else skip.clamp(max=1).float()
        large = [pair for pair in pairs if self._takes(*pair)]
        if large and not self.compiled:
            self.compiled = True
            self._compile(large, divisor, skip)
        ready = [pair for pair in large if self._is_ready(*pair)]
        if ready:
            steps = [self.optimizer.state[parameter]["step"] for parameter, _ in ready]
            if skip is None:
                torch._foreach_add_(steps, 1)
            else:
                torch._foreach_add_(steps, [1 - skip] * len(steps))
            rates = [_rate(group["lr"], ready) for group in self.optimizer.param_groups]
            for parameter, gradient in ready:
                number = self.groups[parameter]
                group, state = self.optimizer.param_groups[number], self.optimizer.state[parameter]
                copy = self.copies[parameter]
                self._launch(parameter, gradient, copy, state, group, rates[number], divisor, skip)
        done = {parameter for parameter, _ in ready}
        return [pair for pair in pairs if pair[0] not in done]

    def _takes(self, parameter: Tensor, gradient: Tensor) -> bool:
        return (
            parameter.numel() >= LARGE
            and parameter.numel() % ALIGNED == 0
            and parameter.dtype is torch.float32
            and gradient.dtype in READ
            and parameter in self.copies
        )

    def _is_ready(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Return whether the optimizer has state for a parameter, and all lies as the kernel needs it."""
        state = self.optimizer.state.get(parameter, {})
        if "exp_avg" not in state:
            return False
        read = (parameter, gradient, self.copies[parameter], state["exp_avg"], state["exp_avg_sq"])
        return all(
            tensor.is_cuda and tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0 for tensor in read
        )

    def _compile(self, pairs: Sequence[Pair], divisor: Tensor | None, skip: Tensor | None) -> None:
        """Run the kernel on values of no consequence: where a step becomes a graph, it cannot be compiled."""
        for given, copied in {(gradient.dtype, self.copies[tensor].dtype) for tensor, gradient in pairs}:
            zeros = [torch.zeros(BLOCK, device=pairs[0][1].device) for _ in range(3)]
            state = {"exp_avg": zeros[1], "exp_avg_sq": zeros[2], "step": zeros[0].new_ones(())}
            for group in self.optimizer.param_groups:
                rate = _rate(group["lr"], pairs)
                copy = zeros[0].to(copied)
                self._launch(zeros[0], zeros[0].to(given), copy, state, group, rate, divisor, skip)

    def _launch(
        self,
        parameter: Tensor,
        gradient: Tensor,
        copy: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
        rate: Tensor,
        divisor: Tensor | None,
        skip: Tensor | None = None,
    ) -> None:
        count, (beta1, beta2) = parameter.numel(), group["betas"]
        _adam[triton.cdiv(count, BLOCK),](
            parameter,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            copy,
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
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
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
