"""One bucket on one device between steps: what chunks compute with, and what the optimizer trains.

[Note: split numbers] Numbers of float32 may lie in two tensors of 16 bits: rounded to bfloat16, and what
rounding leaves of their bits. Chunks compute with the first, and the optimizer needs both. A copy in float32
beside the rounded one would take 6 bytes where 4 are enough, and nothing is lost: the bits of float32 are
those of bfloat16 shifted by 16, and a difference that fits in 16 bits. For that a number half way between two
is rounded away from zero.
"""

import math

import torch
from torch import Tensor

from piper.plan.bucket import Bucket
from piper.runtime.bucket_layout import Flat, Layout, TrainedPieces, own_slice
from piper.runtime.host_state import HostMemory
from piper.runtime.setup import Initial, Setup

AT_A_TIME = 2**24  # elements whose bits lie in memory a second time
NAN = 0x7FC00000  # one NaN for all: others would be rounded to infinity, or to zero


class BucketState:
    """One bucket on one device: its parameters in the type that chunks compute in, and in the optimizer's."""

    def __init__(
        self,
        bucket: Bucket,
        device: int,
        initial: Initial,
        setup: Setup,
        away: HostMemory | None = None,  # memory of the host, if its state is there between steps
    ) -> None:
        self.bucket, self.layout = bucket, Layout(bucket, device)
        self.trains = TrainedPieces(bucket.update, device)
        layout, dtype = self.layout, getattr(torch, bucket.dtype)
        sharded = bucket.zero == 3
        begin, end = layout.held
        self.flat = torch.zeros(end - begin, dtype=dtype, device=setup.device)
        self.own = self.flat[layout.start - begin : layout.stop - begin]
        # The master copy of what this device trains, or what rounding has left of it: see `split`.
        self.master: Tensor | None = None
        if bucket.has_master or bucket.splits:
            kind = torch.int16 if bucket.splits else layout.sums
            if away is not None:
                self.buffer = away.take(self.trains.length * kind.itemsize, setup.device)  # pinned while held
                self.master = self.buffer.data.view(kind).zero_()
            else:
                self.master = torch.zeros(self.trains.length, dtype=kind, device=setup.device)
        for piece in bucket.pieces:
            value = own_slice(initial(piece.name), piece.shardings, layout.position).reshape(-1)
            low, high = max(piece.offset, begin), min(piece.offset + piece.numel, end)
            if low < high:  # the device is given no more than its part
                self.write(value[low - piece.offset : high - piece.offset].to(setup.device), low)
        if self.master is not None and bucket.slices:
            for name, tensor in self.trains.segments(self.master):
                tensor.copy_(initial(name))
        self.param: Flat | Tensor = self.flat if sharded else layout.over(self.flat)

    @property
    def trained(self) -> Tensor:
        """Return the elements that this device updates, in the type that the optimizer sees: to be read."""
        if self.bucket.splits and self.master is not None:
            return join(self.own.to(self.master.device), self.master)
        return self.own if self.master is None else self.master

    def write(self, exact: Tensor, offset: int) -> None:
        """Write elements that begin at an offset of the bucket to all that this device has of them."""
        high = low = exact
        if self.bucket.splits:
            high, low = split(exact.float())
        fill(self.flat, self.layout.held[0], high, offset)
        if self.master is not None and not self.bucket.slices:
            fill(self.master, self.layout.start, low, offset)

    def take(self, exact: Tensor) -> None:
        """Take elements in the type that the optimizer sees as those that this device has updated."""
        if self.master is not None and self.bucket.slices:
            self.master.copy_(exact)
        else:
            self.write(exact, self.layout.start)

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that an optimizer trains, by piece. Between its steps split ones have no memory.

        They are leaves over the memory that is trained: what computes need not know of gradients.
        """
        flat = self.trained
        if self.bucket.splits:  # NaN: who reads it in between sees that there is nothing to read
            flat = torch.full((), math.nan, dtype=flat.dtype, device=flat.device).expand(len(flat))
        return [(name, tensor.detach().requires_grad_()) for name, tensor in self.trains.segments(flat)]

    @property
    def rounds(self) -> bool:
        """Return whether what this device trains is what it holds, in a longer type."""
        return self.master is not None and not self.bucket.slices


def fill(target: Tensor, start: int, value: Tensor, offset: int) -> None:
    """Copy the part of a value that lies in a target; `start`, `offset`: where each begins in the bucket."""
    low, high = max(offset, start), min(offset + len(value), start + len(target))
    if low < high:
        target[low - start : high - start] = value[low - offset : high - offset]


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
