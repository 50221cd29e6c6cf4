"""One bucket on one device between steps: what chunks compute with, and what the optimizer trains.

[Note: split numbers] Numbers of float32 may lie in two tensors of 16 bits: rounded to bfloat16, and what
rounding leaves of their bits. Chunks compute with the first, and the optimizer needs both. A copy in float32
beside the rounded one would take 6 bytes where 4 are enough, and nothing is lost: the bits of float32 are
those of bfloat16 shifted by 16, and a difference that fits in 16 bits. For that a number half way between two
is rounded away from zero.

Where its state is offloaded, it lies in memory of the host, used again from step to step. The device gets it
bucket by bucket, for an update.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.plan.bucket import Bucket
from piper.runtime.accelerator import is_accelerator, module, pin, unpin
from piper.runtime.bucket_layout import Flat, Layout, TrainedPieces, own_slice
from piper.runtime.setup import Initial, Setup

AT_A_TIME = 2**24  # elements whose bits lie in memory a second time
NAN = 0x7FC00000  # one NaN for all: others would be rounded to infinity, or to zero


@dataclass(slots=True, weakref_slot=True)
class HostBuffer:
    """Bytes of the host's memory, and the copy back after which they may be overwritten."""

    data: Tensor
    users: int = 0  # slots whose values share the storage that it is a copy of
    free: torch.Event | None = None  # None: they may be at once


@dataclass(slots=True)
class HostMemory:
    """The buffers that no value is in, by their size. Streams of the host take and give them as threads."""

    idle: dict[int, list[HostBuffer]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def take(self, nbytes: int, device: torch.device) -> HostBuffer:
        """Return a buffer, pinned for accelerators, whose current stream waits until it has been read."""
        with self.lock:
            idle = self.idle.get(nbytes)
            buffer = idle.pop(0) if idle else None
        if buffer is None:
            buffer = HostBuffer(torch.empty(nbytes, dtype=torch.uint8))
            pin(buffer.data, device)
            weakref.finalize(buffer, unpin, buffer.data, device)
            return buffer
        if buffer.free is not None:
            module(device).current_stream(device).wait_event(buffer.free)
        return buffer

    def give(self, buffer: HostBuffer, device: torch.device) -> None:
        """Take a buffer back. The current stream of the device has issued the copy that reads it last."""
        if is_accelerator(device):
            buffer.free = buffer.free or module(device).Event()
            buffer.free.record(module(device).current_stream(device))
        with self.lock:
            self.idle.setdefault(len(buffer.data), []).append(buffer)


class HostState:
    """The state of one bucket: on the host between steps, on the device while it is updated.

    The optimizer finds its tensors where it left them: those on the host take the places of those on the
    device, and the other way round. A master copy of the parameters goes with them.
    """

    def __init__(
        self,
        holding: "BucketState",
        segments: Sequence[Tensor],
        remainders: Mapping[Tensor, Tensor],
        memory: HostMemory,
        optimizer: Optimizer | None,  # None: the device has padding only
        device: torch.device,
    ) -> None:
        """Keep the state of what is trained. remainders: what rounding leaves of it, where it is split."""
        self.trains, self.segments, self.master = holding.trains, segments, holding.master
        self.lying = [remainders.get(tensor, tensor) for tensor in segments]  # the parts of the master copy
        self.memory, self.optimizer, self.device = memory, optimizer, device
        self.here: Tensor | None = None  # the master copy on the device
        self.buffers: dict[tuple[int, str], tuple[HostBuffer, Tensor]] = {}  # by segment and key

    def bring(self, empty: Callable[[int], Tensor]) -> list[Tensor]:
        """Copy the state to bytes that `empty` allocates on the device, for the optimizer; return them."""
        made: list[Tensor] = []

        def brought(value: Tensor) -> Tensor:
            copy = empty(value.numel() * value.element_size()).view(value.dtype).view(value.shape)
            made.append(copy.copy_(value, non_blocking=True))
            return copy

        if self.master is not None:
            self.here = brought(self.master)
            self._use(self.here)
        for _, state, key, value in self._kept():
            state[key] = brought(value)
        return made

    def put_away(self, *, wait: bool = False) -> None:
        """Copy the state to the host, where the optimizer finds it. wait: until it has arrived."""
        if self.master is not None:
            if self.here is not None:
                self.master.copy_(self.here, non_blocking=not wait)
            self._use(self.master)
            self.here = None
        for number, state, key, value in self._kept():
            if (number, key) not in self.buffers:
                buffer = self.memory.take(value.numel() * value.element_size(), self.device)
                self.buffers[number, key] = buffer, buffer.data.view(value.dtype).view(value.shape)
            kept = self.buffers[number, key][1]
            if value is not kept:
                state[key] = kept.copy_(value, non_blocking=not wait)

    def _use(self, flat: Tensor) -> None:
        """Let the parts of the master copy lie in another flat tensor."""
        for tensor, (_, part) in zip(self.lying, self.trains.segments(flat), strict=True):
            tensor.data = part

    def _kept(self) -> Iterator[tuple[int, dict[str, object], str, Tensor]]:
        """Yield the tensors that an optimizer keeps with an element for each of a trained tensor's."""
        states = {} if self.optimizer is None else self.optimizer.state
        for number, tensor in enumerate(self.segments):
            state = states.get(tensor, {})
            for key, value in list(state.items()):
                if isinstance(value, Tensor) and value.dim() and value.numel() == tensor.numel():
                    yield number, state, key, value


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
        """Return the leaves that an optimizer trains, by piece. Split ones get memory only in its steps."""
        flat = self.trained
        if self.bucket.splits:  # NaN: who reads it in between sees that there is nothing to read
            flat = torch.full((), math.nan, dtype=flat.dtype, device=flat.device).expand(len(flat))
        return [(name, tensor.detach().requires_grad_()) for name, tensor in self.trains.segments(flat)]


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
