"""Numbers of float32 in two tensors of 16 bits: rounded to bfloat16, and what rounding leaves of their bits.

Chunks compute with the first, and the optimizer needs both. A copy in float32 beside the rounded one would
take 6 bytes where 4 are enough, and nothing is lost: the bits of float32 are those of bfloat16 shifted by 16,
and a difference that fits in 16 bits. For that a number half way between two is rounded away from zero.
"""

import torch
from torch import Tensor

AT_A_TIME = 2**24  # elements whose bits lie in memory a second time
NAN = 0x7FC00000  # one NaN for all: others would be rounded to infinity, or to zero


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the numbers whose bits two flat tensors hold."""
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low.to(bits.device)).view(torch.float32)


def split(exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return flat numbers of float32 rounded, and what that leaves of their bits."""
    high, low = (exact.new_empty(len(exact), dtype=kind) for kind in (torch.bfloat16, torch.int16))
    for begin in range(0, len(exact), AT_A_TIME):
        part = slice(begin, begin + AT_A_TIME)
        bits = exact[part].view(torch.int32).masked_fill(exact[part].isnan(), NAN)
        rounded = (bits + 0x8000).bitwise_right_shift_(16)
        high[part].view(torch.int16).copy_(rounded)
        low[part].copy_(bits.sub_(rounded.bitwise_left_shift_(16)))
    return high, low
