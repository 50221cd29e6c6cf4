"""Memory of the host for values that a device copies out and takes back, used again from step to step."""

import weakref
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from piper.runtime.accelerator import is_accelerator, module, pin, unpin


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
