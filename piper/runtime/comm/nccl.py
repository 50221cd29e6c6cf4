"""Devices as processes with an accelerator each: communication over NCCL, on the stream that is current.

Collectives are NCCL's own, so a sum is taken in the order that NCCL chooses: it may differ in its last bits
from what the other groups give, and from one number of members to another, though not from run to run.
Values that only move (exchanges, gathers, broadcasts, transfers) have the same bits.

Nothing makes the host wait. The caller that waits for the stream calls `abort` after its timeout: NCCL's
kernels then end.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from piper.ir.devices import Devices
from piper.plan.plan import Plans
from piper.runtime.comm.base import CommError, Comms, Form, Group

OptionsT = TypeVar(
    "OptionsT", AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions, ReduceScatterOptions
)
GRACE = timedelta(seconds=60)  # after our own clock has run out, before NCCL ends the process


class NcclComms(Comms):
    """The communicators of one device of a job, met over a store that all its workers share.

    Every device makes its groups in the order of the plans, and members of a group wait for each other, so no
    two wait in a circle. Each communicator of a plan is one of its own: sends, receives and collectives never
    queue behind each other.
    """

    on_streams = True

    def __init__(
        self, plans: Plans, device: int, store: Store, accelerator: torch.device, timeout: float
    ) -> None:
        super().__init__(plans.comms, device)
        self.accelerator, self.timeout = accelerator, timedelta(seconds=timeout)
        self.made: dict[tuple[str, Devices], ProcessGroup] = {}
        for comm in plans.comms.values():
            for number, members in enumerate(comm.groups):
                if device in members:
                    prefix = PrefixStore(f"nccl/{comm.name}/{number}", store)
                    self.made[comm.name, members] = self._make(prefix, members)

    def _make(self, store: Store, members: Devices) -> ProcessGroup:
        from torch.distributed import ProcessGroupNCCL  # only where torch is built with it

        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.timeout + GRACE
        made = ProcessGroupNCCL(store, members.index(self.device), len(members), options)
        made.eager_connect_single_device(self.accelerator)
        return cast(ProcessGroup, made)  # which torch annotates, and has the same methods

    def group_of(self, name: str, members: Devices) -> "NcclGroup":
        return NcclGroup(self.made[name, members], name, members.index(self.device), len(members))

    def pipe(self, name: str, ends: Devices) -> "NcclPipe":
        return NcclPipe(self.made[name, ends], name, self.accelerator)

    def abort(self) -> None:
        """End all that is under way on every communicator, here."""
        for made in self.made.values():
            made.abort()


def issue(work: Work | None, name: str) -> None:
    """Let the current stream run after an operation; the host goes on."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise CommError(f"on {name}: {error}") from error


def now(options: OptionsT) -> OptionsT:
    """Let an operation run on the current stream: no other one, and no memory shared with it."""
    options.asyncOp = False
    return options


class NcclGroup(Group):
    """A group of processes with an accelerator each."""

    def __init__(self, made: ProcessGroup, name: str, rank: int, size: int) -> None:
        super().__init__(name, rank, size)
        self.made = made

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        return self.all_to_all(torch.cat(list(parts)), [len(part) for part in parts], lengths)

    def all_to_all(self, rows: Tensor, gives: Sequence[int], gets: Sequence[int]) -> list[Tensor]:
        out = rows.new_empty((sum(gets), *rows.shape[1:]))
        options = now(AllToAllOptions())
        issue(self.made.alltoall_base(out, rows.contiguous(), list(gets), list(gives), options), self.name)
        return list(out.split(list(gets)))

    def all_reduce(self, flat: Tensor) -> Tensor:
        """Return the sum of every member's tensor, in the memory of this member's."""
        issue(self.made.allreduce([flat], now(AllreduceOptions())), self.name)
        return flat

    def reduce_scatter(self, flat: Tensor, length: int) -> Tensor:
        if len(flat) != length * self.size:  # beyond its end there are zeros
            whole = flat.new_zeros(length * self.size)
            whole[: len(flat)] = flat
            flat = whole
        shard = flat.new_empty(length)
        issue(self.made._reduce_scatter_base(shard, flat, now(ReduceScatterOptions())), self.name)
        return shard

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        options = now(AllgatherOptions())
        issue(self.made._allgather_base(out, shard, options), self.name)  # NCCL allows it to lie inside `out`

    def broadcast(self, value: Tensor) -> Tensor:
        mine = value if self.rank == 0 else torch.empty_like(value)
        options = now(BroadcastOptions())
        options.rootRank = 0
        issue(self.made.broadcast([mine], options), self.name)
        return mine


class NcclPipe:
    """A connection over NCCL.

    A transfer is an exchange in which one of the two gives nothing: like every collective it runs on the
    current stream, while torch issues NCCL's sends and receives on a stream of their own.
    """

    def __init__(self, made: ProcessGroup, name: str, accelerator: torch.device) -> None:
        self.made, self.name, self.accelerator = made, name, accelerator

    def send(self, value: Tensor) -> None:
        flat = value.contiguous().view(-1)
        self._exchange(flat.new_empty(0), flat, [0, 0], [0, len(flat)])

    def recv(self, form: Form) -> Tensor:
        value = torch.empty(form.shape, dtype=form.dtype, device=self.accelerator)
        flat = value.view(-1)
        self._exchange(flat, flat.new_empty(0), [len(flat), 0], [0, 0])
        return value

    def _exchange(self, out: Tensor, rows: Tensor, gets: list[int], gives: list[int]) -> None:
        issue(self.made.alltoall_base(out, rows, gets, gives, now(AllToAllOptions())), self.name)
