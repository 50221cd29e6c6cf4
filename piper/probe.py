"""What an optimizer is like, found out by running it on a few numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

SIDE = 4  # of the square that is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What compiling needs to know of an optimizer."""

    name: str
    state_bytes: int  # of state for one parameter element
    elementwise: bool  # it treats every element alike, whatever tensor it sits in
    why: str = ""  # why not


def probe_optimizer(make: Callable[[Iterable[Tensor]], Optimizer]) -> Probe:
    """Step an optimizer on a whole square and on its two halves: an elementwise one does the same to both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start, grads = torch.randn(SIDE, SIDE), [torch.randn(SIDE, SIDE) for _ in range(2)]
    whole, optimizer = _stepped(make, [start], [[grad] for grad in grads])
    name = type(optimizer).__name__
    state_bytes = _state_bytes(optimizer)
    half = SIDE * SIDE // 2
    try:
        flat, _ = _stepped(
            make,
            [start.flatten()[:half], start.flatten()[half:]],
            [[grad.flatten()[:half], grad.flatten()[half:]] for grad in grads],
        )
    except (ValueError, RuntimeError, IndexError) as error:
        return Probe(
            name=name, state_bytes=state_bytes, elementwise=False, why=f"it refuses a flat shard: {error}"
        )
    alike = torch.allclose(torch.cat(flat), whole[0].flatten(), rtol=1e-5, atol=1e-7)
    why = "" if alike else "a parameter cut in two is updated in another way than the whole"
    return Probe(name=name, state_bytes=state_bytes, elementwise=alike, why=why)


def _stepped(
    make: Callable[[Iterable[Tensor]], Optimizer], values: list[Tensor], grads: list[list[Tensor]]
) -> tuple[list[Tensor], Optimizer]:
    params = [value.clone().requires_grad_() for value in values]
    optimizer = make(params)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params], optimizer


def _state_bytes(optimizer: Optimizer) -> int:
    total = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return total // (SIDE * SIDE)
