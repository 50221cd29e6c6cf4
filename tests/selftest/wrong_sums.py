"""A process of the self-test whose communicators add wrongly: one element of a sum is too large by a thousandth."""

from collections.abc import Sequence

from torch import Tensor

from piper.runtime.comm import base
from piper.selftest import rank_process

right = base.summed


def wrong(parts: Sequence[Tensor]) -> Tensor:
    total = right(parts)
    if total.numel() and total.is_floating_point():
        total.view(-1)[-1] *= 1.001
    return total


def main(descriptors: Sequence[int]) -> int:
    """Be a rank, or the worker of a job, that adds wrongly."""
    base.summed = wrong
    return rank_process.main(descriptors)
