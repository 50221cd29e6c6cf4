"""The distance of numbers, relative to their size. NaN on either side is never close."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

# A tensor below this share of the largest one is compared in units of it. The gradient of a bias of keys
# is 0, for example: what is computed is the rounding of terms as large as those of other gradients.
QUIET = 1e-4


def relative(got: float, wanted: float) -> float:
    """Return how far two numbers are apart, in units of the second. NaN: infinitely far."""
    if math.isnan(got) or math.isnan(wanted):
        return math.inf
    return abs(got - wanted) / max(abs(wanted), 1e-30) if got != wanted else 0.0


def differences(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, float, str]]:
    """Yield how far each tensor is apart, in units of its largest element, and what is wrong beside that."""
    sizes = (size(value) for value in wanted.values())
    largest = max((each for each in sizes if math.isfinite(each)), default=0.0)
    for name in (*wanted, *(name for name in got if name not in wanted)):
        if name not in got:
            yield name, math.inf, "is missing in the run"
        elif name not in wanted:
            yield name, math.inf, "is in the run, but not in plain PyTorch"
        elif got[name].shape != wanted[name].shape:
            shapes = f"{list(got[name].shape)}, in plain PyTorch {list(wanted[name].shape)}"
            yield name, math.inf, f"has the shape {shapes}"
        else:
            yield name, distance(got[name], wanted[name], QUIET * largest), nan_in(got[name], wanted[name])


def size(value: Tensor) -> float:
    """Return the largest element of a tensor."""
    return wide(value).abs().max().item() if value.numel() else 0.0


def wide(value: Tensor) -> Tensor:
    """Return a tensor in double precision."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def distance(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference of two tensors, in units of the second one's largest element."""
    if got.shape != wanted.shape:
        return math.inf
    gap = size(wide(got.to(wanted.device)) - wide(wanted))
    if math.isnan(gap):  # NaN on a side, or infinities on both
        return math.inf
    return gap / max(size(wanted), floor, 1e-30) if gap else 0.0


def nan_in(got: Tensor | float, wanted: Tensor | float) -> str:
    """Say on which side there is NaN, if on any."""
    sides = [
        side
        for side, value in (("in the run", got), ("in plain PyTorch", wanted))
        if (bool(value.isnan().any()) if isinstance(value, Tensor) else math.isnan(value))
    ]
    return f"is NaN {' and '.join(sides)}" if sides else ""
