"""Memory of the host for values that a device copies out and takes back, used again from step to step."""

import weakref
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor


@dataclass(slots=True, weakref_slot=True)
class HostBuffer:
    """Bytes of the host's memory, and the copy back after which they may be overwritten."""

    data: Tensor
    users: int = 0  # slots whose values share the storage that it is a copy of
    free: torch.cuda.Event | None = None  # None: they may be at once


@dataclass(slots=True)
class HostMemory:
    """The buffers that no value is in, by their size. Streams of the host take and give them as threads."""

    idle: dict[int, list[HostBuffer]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def take(self, nbytes: int, device: torch.device) -> HostBuffer:
        """Return a buffer, the one that was given back longest ago or a new one. It is pinned for CUDA.

        The current stream of the device waits until the buffer has been read.
        """
        with self.lock:
            found = self.idle.get(nbytes)
            buffer = found.pop(0) if found else None
        if buffer is None:
            made = HostBuffer(torch.empty(nbytes, dtype=torch.uint8))
            if device.type == "cuda" and nbytes:
                pin(made)
            return made
        if buffer.free is not None:
            torch.cuda.current_stream(device).wait_event(buffer.free)
        return buffer

    def give(self, buffer: HostBuffer, device: torch.device) -> None:
        """Take a buffer back. The current stream of the device has issued the copy that reads it last."""
        if device.type == "cuda":
            buffer.free = buffer.free or torch.cuda.Event()
            buffer.free.record(torch.cuda.current_stream(device))
        with self.lock:
            self.idle.setdefault(len(buffer.data), []).append(buffer)


def pin(buffer: HostBuffer) -> None:
    """Register a buffer as pinned memory until it is freed.

    PyTorch's own pinned memory comes in powers of two: large activations would take up to twice their bytes.
    """
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data.data_ptr(), len(buffer.data), 0))
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data.data_ptr())
