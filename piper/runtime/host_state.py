"""Memory of the host, used again from step to step, and the optimizer's state that is kept in it.

The device gets the state bucket by bucket, for an update.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.runtime.accelerator import is_accelerator, module, pin, unpin
from piper.runtime.bucket_layout import TrainedPieces


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
        """Return a buffer, the one that was given back longest ago or a new one; accelerators need it pinned.

        The current stream of the device waits until the buffer has been read.
        """
        with self.lock:
            idle = self.idle.get(nbytes)
            buffer = idle.pop(0) if idle else None
        if buffer is None:
            buffer = HostBuffer(torch.empty(nbytes, dtype=torch.uint8))
            if is_accelerator(device) and nbytes:
                pin(buffer.data)
                weakref.finalize(buffer, unpin, buffer.data)
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
        trains: TrainedPieces,
        segments: Sequence[Tensor],
        lying: Sequence[Tensor],
        master: Tensor | None,
        memory: HostMemory,
        device: torch.device,
    ) -> None:
        """Keep the state of some trained tensors.

        master: on the host, the copy of what they hold, or of what rounding leaves of it. lying: its parts.
        """
        self.trains, self.segments, self.lying, self.master = trains, segments, lying, master
        self.memory, self.device = memory, device
        self.here: Tensor | None = None  # the master copy on the device
        self.buffers: dict[tuple[int, str], tuple[HostBuffer, Tensor]] = {}  # by segment and key

    def bring(self, optimizer: Optimizer, empty: Callable[[int], Tensor]) -> list[Tensor]:
        """Copy the state to the device, for the optimizer to use it there. Return the copies.

        empty: allocates bytes on the device.
        """
        made: list[Tensor] = []

        def brought(value: Tensor) -> Tensor:
            copy = empty(value.numel() * value.element_size()).view(value.dtype).view(value.shape)
            made.append(copy.copy_(value, non_blocking=True))
            return copy

        if self.master is not None:
            self.here = brought(self.master)
            self._use(self.here)
        for _, tensor, key, value in self._kept(optimizer):
            optimizer.state[tensor][key] = brought(value)
        return made

    def put_away(self, optimizer: Optimizer, *, wait: bool = False) -> None:
        """Copy the state to the host, where the optimizer finds it. wait: until it has arrived."""
        if self.master is not None:
            if self.here is not None:
                self.master.copy_(self.here, non_blocking=not wait)
            self._use(self.master)
            self.here = None
        for number, tensor, key, value in self._kept(optimizer):
            if (number, key) not in self.buffers:
                buffer = self.memory.take(value.numel() * value.element_size(), self.device)
                self.buffers[number, key] = buffer, buffer.data.view(value.dtype).view(value.shape)
            kept = self.buffers[number, key][1]
            if value is not kept:
                optimizer.state[tensor][key] = kept.copy_(value, non_blocking=not wait)

    def _use(self, flat: Tensor) -> None:
        """Let the parts of the master copy lie in another flat tensor."""
        for tensor, (_, part) in zip(self.lying, self.trains.segments(flat), strict=True):
            tensor.data = part

    def _kept(self, optimizer: Optimizer) -> Iterator[tuple[int, Tensor, str, Tensor]]:
        """Yield the tensors that an optimizer keeps with an element for each of a trained tensor's."""
        for number, tensor in enumerate(self.segments):
            for key, value in list(optimizer.state.get(tensor, {}).items()):
                if isinstance(value, Tensor) and value.dim() and value.numel() == tensor.numel():
                    yield number, tensor, key, value
