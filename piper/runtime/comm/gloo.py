"""Devices as processes: communication over gloo, with the same bits as among threads.

Gloo's own reductions add in an order that depends on the number of members; here rows only travel, and every
sum is taken by `Group`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from piper.ir.devices import Devices
from piper.plan.plan import Comm, Plans
from piper.runtime.comm.base import CommError, Comms, Form, Group, joined


class GlooTransport:
    """What all communicators of a worker listen and send with: one socket and one thread for all of them."""

    def __init__(self, host: str) -> None:
        self.device = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)


class GlooComms(Comms):
    """The communicators of one device of a job, met over a store that all its workers share.

    Members of a group wait for each other here; every device makes its groups in the order of the plans, so
    no two wait for each other in a circle. All pipes between two devices share a connection, each with a tag:
    the bytes of a tag are sent when the receiver has asked for them, so no pipe waits for another.
    """

    def __init__(
        self,
        plans: Plans,
        device: int,
        store: Store,
        host: "str | GlooTransport",  # the address to listen on, or what other programs listen with already
        timeout: float,
        *,
        patience: timedelta | None = None,  # how long to wait for the others here: some may start late
    ) -> None:
        super().__init__(plans.comms, device)
        self.timeout = timedelta(seconds=timeout)
        self.patience = patience or self.timeout
        self.transport = host if isinstance(host, GlooTransport) else GlooTransport(host)
        self.tags = {name: number for number, name in enumerate(plans.comms)}
        self.groups: dict[tuple[str, Devices], ProcessGroup] = {}
        self.links: dict[Devices, ProcessGroup] = {}  # of pipes, by the two devices
        for comm in plans.comms.values():
            for number, members in enumerate(comm.groups):
                if device in members:
                    self._connect(comm, members, PrefixStore(f"{comm.name}/{number}", store))

    def _connect(self, comm: Comm, members: Devices, store: Store) -> None:
        """Meet the members of a group, unless it is a pair that has met for another pipe."""
        if comm.kind == "pairs":
            ends = tuple(sorted(members))
            if ends not in self.links:
                self.links[ends] = self._process_group(store, ends, 0)  # gloo's own loop sends and receives
        else:  # a stream waits for each collective before it begins the next
            self.groups[comm.name, members] = self._process_group(store, members, 1)

    def _process_group(self, store: Store, members: Devices, threads: int) -> ProcessGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self.transport.device]
        options._threads = threads
        options._timeout = self.patience
        # It has the methods of `ProcessGroup`, which torch annotates.
        return cast(ProcessGroup, ProcessGroupGloo(store, members.index(self.device), len(members), options))

    def group_of(self, name: str, members: Devices) -> "GlooGroup":
        return GlooGroup(
            self.groups[name, members], name, members.index(self.device), len(members), self.timeout
        )

    def pipe(self, name: str, ends: Devices) -> "GlooPipe":
        pair = tuple(sorted(ends))
        peer = 1 - pair.index(self.device)
        return GlooPipe(self.links[pair], name, peer, self.tags[name], self.timeout)


def finish(work: Work, name: str, timeout: timedelta) -> None:
    """Wait for one operation until the timeout."""
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise CommError(f"on {name}: {error}") from error


class GlooGroup(Group):
    """A group of processes."""

    def __init__(self, methods: ProcessGroup, name: str, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(name, rank, size)
        self.methods, self.timeout = methods, timeout

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        gives = [len(part) for part in parts]
        rows = joined(parts)
        out = rows.new_empty((sum(lengths), *rows.shape[1:]))
        finish(self.methods.alltoall_base(out, rows, list(lengths), gives), self.name, self.timeout)
        return list(out.split(list(lengths)))

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        # The shard may lie inside `out`, which gloo would write while it reads.
        inside = shard.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        finish(self.methods._allgather_base(out, shard.clone() if inside else shard), self.name, self.timeout)

    def broadcast(self, value: Tensor) -> Tensor:
        mine = value if self.rank == 0 else torch.empty_like(value)
        finish(self.methods.broadcast(mine, 0), self.name, self.timeout)
        return mine


class GlooPipe:
    """A connection over gloo."""

    def __init__(self, methods: ProcessGroup, name: str, peer: int, tag: int, timeout: timedelta) -> None:
        self.methods, self.name, self.peer, self.tag, self.timeout = methods, name, peer, tag, timeout

    def send(self, value: Tensor) -> None:
        finish(self.methods.send([value.contiguous()], self.peer, self.tag), self.name, self.timeout)

    def recv(self, form: Form) -> Tensor:
        value = torch.empty(form.shape, dtype=form.dtype)
        finish(self.methods.recv([value], self.peer, self.tag), self.name, self.timeout)
        return value
