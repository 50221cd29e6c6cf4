"""Communication of tensors on an accelerator through a group that only reaches the host.

Values go to pinned memory, travel, and come back; the host waits for each. It is how several devices of a job
share one accelerator, which NCCL refuses. Sums are taken on the accelerator, from the first member to the
last, so they have the bits of every other group but NCCL's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.ir.devices import Devices
from piper.runtime.accelerator import wait_for_stream
from piper.runtime.comm.base import Comms, Form, Group, Pipe


class StagedComms(Comms):
    """The communicators of one device, for tensors on its accelerator."""

    def __init__(self, inner: Comms, accelerator: torch.device) -> None:
        super().__init__(inner.comms, inner.device)
        self.inner, self.accelerator = inner, accelerator

    def group_of(self, name: str, members: Devices) -> "StagedGroup":
        return StagedGroup(self.inner.group_of(name, members))

    def pipe(self, name: str, ends: Devices) -> "StagedPipe":
        return StagedPipe(self.inner.pipe(name, ends), self.accelerator)


class StagedGroup(Group):
    """A group whose values travel through the host."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner.name, inner.rank, inner.size)
        self.inner = inner

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        rows = to_host(torch.cat(list(parts)))
        arrived = self.inner.swap(rows.split([len(part) for part in parts]), lengths)
        return list(to_accelerator(torch.cat(arrived), parts[0].device).split(list(lengths)))

    def all_reduce(self, flat: Tensor) -> Tensor:
        # In place: another stream may have taken the memory, and gets it back where the plan says so.
        return flat.copy_(super().all_reduce(flat))

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        whole = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        self.inner.all_gather(to_host(shard), whole)
        out.copy_(whole, non_blocking=True)

    def broadcast(self, value: Tensor) -> Tensor:
        return to_accelerator(self.inner.broadcast(to_host(value)), value.device)


class StagedPipe:
    """A connection from one device to another through the hosts of both."""

    def __init__(self, inner: Pipe, accelerator: torch.device) -> None:
        self.inner, self.accelerator = inner, accelerator

    def send(self, value: Tensor) -> None:
        self.inner.send(to_host(value))

    def recv(self, form: Form) -> Tensor:
        return to_accelerator(self.inner.recv(form), self.accelerator)


def to_host(value: Tensor) -> Tensor:
    """Copy a value to pinned memory and return it; only the current stream is waited for."""
    here = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    here.copy_(value, non_blocking=True)
    wait_for_stream(value.device)
    return here


def to_accelerator(value: Tensor, device: torch.device) -> Tensor:
    """Copy a value to an accelerator in the order of the current stream, and return the copy."""
    return value.pin_memory().to(device, non_blocking=True)
