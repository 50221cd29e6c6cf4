"""One bucket on one device between steps: what chunks compute with, and what the optimizer trains."""

import math

import torch
from torch import Tensor

from piper.plan.bucket import Bucket
from piper.runtime.bucket_layout import Flat, Layout, TrainedPieces
from piper.runtime.host_state import HostMemory
from piper.runtime.setup import Initial, Setup
from piper.runtime.split_master import join, split


class BucketState:
    """One bucket on one device: its parameters in the type that chunks compute in, and in the optimizer's."""

    def __init__(
        self,
        bucket: Bucket,
        device: int,
        initial: Initial,
        setup: Setup,
        away: HostMemory | None = None,
    ) -> None:
        """Fill a device's part of a bucket. away: the memory of the host that its state is in, if it is."""
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
        for index, piece in enumerate(bucket.pieces):
            value = layout.local(initial(piece.name), index).reshape(-1)
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
