"""Lets a constructor convert modules of fake tensors, as `module.to(dtype)` does.

Works around: torch 2.11. It swaps a tensor for its converted one, which fails for a fake: weak references to
it exist. So fakes get other data instead.
Not needed from: no version yet.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from piper.process.attributes import replaced


def converting_fakes() -> AbstractContextManager[None]:
    """Give fake tensors that are converted inside the block other data."""
    before: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def swap(first: Tensor, second: Tensor) -> None:
        if isinstance(first, FakeTensor) and isinstance(second, FakeTensor):
            assign(first, second.data)
        else:
            before(first, second)

    return replaced(torch.utils, "swap_tensors", swap)


def assign(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor another value, of any type and device. It stays the same object."""
    tensor.data = value
    if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device  # which is no part of its data
