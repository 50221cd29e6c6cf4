"""Communication as one device sees it: groups that reduce and exchange, and pipes from one device to another.

Every implementation gives the same bits: a sum over a group is taken element by element from the first
member to the last, on any member and over any transport. A new implementation has to provide `Group.swap`
and a pipe; the rest is built on these.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from piper.ir.devices import Devices
from piper.plan.plan import Comm, Plans

SMALL = 4096  # elements: below it a sum in one round beats one in two


class CommError(RuntimeError):
    """A failed communication: a peer is late, or has failed."""


class StoppedError(CommError):
    """Another worker has failed, so this one gives up waiting for it."""


class Group(ABC):
    """The devices of one group of a communicator, as its member `rank` sees them."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size

    @abstractmethod
    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Give part i to member i, and return what each gave to this one: `lengths` of their first axes."""
        # No member may write to the tensors that it gave or got.

    def all_reduce(self, flat: Tensor) -> Tensor:
        """Return the sum of every member's tensor, as a new one."""
        if flat.numel() <= SMALL:
            return summed(self.swap([flat] * self.size, [len(flat)] * self.size))
        length = -(-len(flat) // self.size)
        out = flat.new_empty(length * self.size)
        self.all_gather(self.reduce_scatter(flat, length), out)
        return out if len(out) == len(flat) else out[: len(flat)].clone()

    def reduce_scatter(self, flat: Tensor, length: int) -> Tensor:
        """Return this member's `length` elements of the sum; beyond the end of `flat` they are zero."""
        lengths = [max(0, min(length, len(flat) - i * length)) for i in range(self.size)]
        mine = lengths[self.rank]
        total = summed(self.swap(flat.split(lengths), [mine] * self.size))
        if mine == length:
            return total
        shard = flat.new_zeros(length)
        shard[:mine] = total
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """Write every member's shard into `out`, in order. `shard` may be this member's part of `out`."""
        self.all_gather_uneven(shard, out, [len(shard)] * self.size)

    def reduce_scatter_uneven(self, flat: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return this member's part of the sum, where members have parts of different lengths."""
        return summed(self.swap(flat.split(list(lengths)), [lengths[self.rank]] * self.size))

    def all_gather_uneven(self, shard: Tensor, out: Tensor, lengths: Sequence[int]) -> None:
        """Write every member's shard into `out`, in order; `shard` may be this member's part of `out`."""
        parts = self.swap([shard] * self.size, lengths)
        for i, (part, there) in enumerate(zip(parts, out.split(list(lengths)), strict=True)):
            if i != self.rank or there.data_ptr() != shard.data_ptr():
                there.copy_(part)

    def all_to_all(self, rows: Tensor, gives: Sequence[int], gets: Sequence[int]) -> list[Tensor]:
        """Give the first `gives[0]` rows to the first member, and so on; what comes from each member."""
        return self.swap(rows.split(list(gives)), gets)

    def shift(self, flat: Tensor, by: int) -> Tensor:
        """Give a tensor to the member `by` places on, around the end, and return what this one is given."""
        return self.shift_uneven(flat, len(flat), by)

    def shift_uneven(self, flat: Tensor, length: int, by: int = 1) -> Tensor:
        """Do the same where `length` elements arrive, which may be more or fewer than leave."""
        gives, gets = [0] * self.size, [0] * self.size
        source = (self.rank - by) % self.size
        gives[(self.rank + by) % self.size], gets[source] = len(flat), length
        return self.all_to_all(flat, gives, gets)[source]

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the first member's value."""
        flat, others = value.reshape(-1), self.size - 1
        if self.rank == 0:
            self.swap([flat[:0]] + [flat] * others, [0] * self.size)
            return value
        return self.swap([flat[:0]] * self.size, [len(flat)] + [0] * others)[0].view(value.shape)


class Form(NamedTuple):
    """The shape and type of what one transfer moves, in every step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pipe(Protocol):
    """One end of a first-in first-out connection between two devices."""

    def send(self, value: Tensor) -> None:
        """Hand a value over; this may wait until it is taken. The sender may not write to it afterwards."""

    def recv(self, form: Form) -> Tensor:
        """Return the next value that arrives."""


class Comms(ABC):
    """The communicators of one device, by the plan's names."""

    on_streams: ClassVar[bool] = False  # work is queued on streams, and the host does not wait for it

    def __init__(self, comms: Mapping[str, Comm], device: int) -> None:
        self.comms, self.device = comms, device

    def group(self, name: str) -> Group:
        """Return the group of this communicator that the device is in."""
        return self.group_of(name, self.comms[name].group_of(self.device))

    def outgoing(self, name: str) -> Pipe:
        """Return the pipe that this device sends into."""
        return self.pipe(name, self.comms[name].group_of(self.device, "send"))

    def incoming(self, name: str) -> Pipe:
        """Return the pipe that this device receives from."""
        return self.pipe(name, self.comms[name].group_of(self.device, "recv"))

    @abstractmethod
    def group_of(self, name: str, members: Devices) -> Group:
        """Return the group of these members, of which this device is one."""

    @abstractmethod
    def pipe(self, name: str, ends: Devices) -> Pipe:
        """Return this device's end of the pipe from one device to another."""

    def abort(self) -> None:  # noqa: B027  most have nothing to end
        """End all communication that is under way: this device has failed. Other timeouts may be late."""


def speaks_in(plans: Plans, others: Plans) -> bool:
    """Return whether plans need no communicators but those that other plans have."""
    return all(others.comms.get(name) == comm for name, comm in plans.comms.items())


def joined(parts: Sequence[Tensor], *, whole: bool = False) -> Tensor:
    """Join parts: as a view where they follow each other in memory, and are all of it if `whole`."""
    full = [part for part in parts if len(part)]
    if not full:
        return parts[0]
    first, storage, place = full[0], full[0].untyped_storage(), full[0].data_ptr()
    for part in full:
        elsewhere = part.untyped_storage().data_ptr() != storage.data_ptr()
        if elsewhere or part.data_ptr() != place or not part.is_contiguous():
            return torch.cat(full)
        place += part.nbytes
    if whole and (first.storage_offset() or place != storage.data_ptr() + storage.nbytes()):
        return torch.cat(full)
    return first.as_strided((sum(map(len, full)), *first.shape[1:]), first.stride())


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors from left to right, as a new one; short types are added in float32."""
    first = parts[0]
    if first.dtype in (torch.bfloat16, torch.float16):
        total = first.float()
        for part in parts[1:]:
            total += part
        return total.to(first.dtype)
    if len(parts) == 1:
        return first.clone()
    total = first + parts[1]
    for part in parts[2:]:
        total += part
    return total
