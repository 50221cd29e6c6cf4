"""Processes that are ranks of a crew: they make one call at the same time, over gloo or NCCL."""

import itertools
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from piper.plan.plan import Comm, Plans
from piper.runtime.accelerator import device_of, is_accelerator
from piper.runtime.comm.base import Comms
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.nccl import NcclComms
from piper.workers import serve
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.serve import crowded
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import pack, unpack
from piper.workers.transport.sockets import ClosedError

TASK = 1  # descriptors of a process of ours; a worker of a job has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of some calls meet, and what they run on."""

    size: int
    kind: str  # of device
    shares: bool  # ranks outnumber accelerators
    timeout: float  # seconds of one communication
    port: int  # of the store
    number: int  # calls of one number share communicators and what they keep

    @property
    def apart(self) -> bool:
        """Return whether each rank has an accelerator of its own: only then large tensors tell anything."""
        return is_accelerator(self.kind) and not self.shares


class Rank:
    """One rank of a meeting: its number, its communicators, and what it keeps from call to call."""

    def __init__(self, number: int, meeting: Meeting) -> None:
        self.number, self.meeting, self.size = number, meeting, meeting.size
        self.device = device_of(meeting.kind)
        self.kept: dict[str, object] = {}
        if is_accelerator(self.device):
            serve.take_one(meeting.kind, number)
            if meeting.shares:
                serve.name_as_machine(number, alone=True)
            torch.accelerator.set_device_index(0)

    @cached_property
    def store(self) -> Store:
        """Return the store in which the ranks of this meeting find each other."""
        wait = timedelta(seconds=TIMEOUTS.meeting)
        met = TCPStore(LOOPBACK, self.meeting.port, is_master=False, wait_for_workers=False, timeout=wait)
        return PrefixStore(str(self.meeting.number), met)

    @cached_property
    def comms(self) -> Comms:
        """Return communicators of every kind, which all ranks must ask for."""
        plans, timeout = plans_for(self.size), self.meeting.timeout
        if is_accelerator(self.device):
            return NcclComms(plans, self.number, self.store, self.device, timeout)
        patience = timedelta(seconds=TIMEOUTS.meeting)  # to connect: some ranks may be late
        return GlooComms(plans, self.number, self.store, LOOPBACK, timeout, patience=patience)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if is_accelerator(self.device):
            torch.accelerator.synchronize()


Call = Callable[[Rank], object]


Answer = tuple[object, str | None]  # what a call returned, on the host, and the traceback of what it raised


def plans_for(size: int) -> Plans:
    """Return plans with every kind of communicator between so many devices."""
    every, cut = tuple(range(size)), (size + 1) // 2
    comms = (
        Comm(name="all", kind="groups", groups=(every,)),
        Comm(name="halves", kind="groups", groups=(every[:cut], every[cut:])),
        Comm(name="ring", kind="pairs", groups=tuple((i, (i + 1) % size) for i in every)),
    )
    return Plans(plans=(), comms={comm.name: comm for comm in comms}, buckets={}, seed=1.0, weighted=False)


def main(descriptors: Sequence[int]) -> int:
    """Make one call after another; or be the worker of a job, so that one fork server serves both."""
    if len(descriptors) != TASK:
        return serve.main(descriptors)
    torch.set_num_threads(1)
    channel, rank = Channel(socket.socket(fileno=descriptors[0])), None
    while True:
        try:
            number, meeting, call = cast("tuple[int, Meeting, Call]", unpack(cast(bytes, channel.recv())))
        except ClosedError:
            return 0
        try:
            if rank is None or rank.meeting != meeting:
                rank = Rank(number, meeting)
            answer: Answer = on_host(call(rank)), None
        except Exception:  # noqa: BLE001  it is sent to the process that asked, which raises
            rank, answer = None, (None, traceback.format_exc())
        channel.send(answer)


def on_host(value: object) -> object:
    """Return a result with its tensors on the host."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(on_host, value))
    return value


Communicate = Callable[[int, Comms], object]


class RankError(RuntimeError):
    """A call that a rank did not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Ranks that communicate."""

    size: int
    run: Callable[[Communicate], list[object]]  # on every rank at once; the results in the order of the ranks
    place: torch.device = torch.device("cpu")  # noqa: RUF009  of the tensors that they communicate
    exact: bool = True  # sums are taken from the first rank to the last, to the bit


class Processes:
    """Processes of ranks. When one fails or does not answer all are ended, and started for the next call."""

    def __init__(self, forks: ForkServer, most: int, bound: float, kind: str = "cpu") -> None:
        """Prepare for up to `most` ranks; `bound`: seconds that an answer may take. kind: of device."""
        self.forks, self.most, self.bound, self.kind = forks, most, bound, kind
        self.store, self.numbers = store_on(LOOPBACK), itertools.count()
        self.channels: list[Channel] = []
        self.pids: list[int] = []

    def meet(self, size: int, timeout: float) -> Meeting:
        """Return a new meeting of the first ranks; `timeout`: seconds of one communication."""
        shares = is_accelerator(self.kind) and crowded(self.most)
        number = next(self.numbers)
        return Meeting(
            size=size, kind=self.kind, shares=shares, timeout=timeout, port=self.store.port, number=number
        )

    def call(self, meeting: Meeting, call: Call) -> list[object]:
        """Make a call on all ranks of a meeting at once, and return the results in their order."""
        while len(self.channels) < self.most:
            here, there = socket.socketpair()
            with there:
                self.pids.append(self.forks.fork([there.fileno()]))
            self.channels.append(Channel(here, self.bound))
        for rank, channel in enumerate(self.channels[: meeting.size]):
            channel.send(pack((rank, meeting, call)))
        answers = [self._answer(rank) for rank in range(meeting.size)]
        if any(trace for _, trace in answers):
            self.close()
            traces = (f"rank {rank}: {trace or 'done'}" for rank, (_, trace) in enumerate(answers))
            raise RankError("not every rank has done its task\n" + "\n".join(traces))
        return [value for value, _ in answers]

    def _answer(self, rank: int) -> Answer:
        try:
            return cast(Answer, self.channels[rank].recv())
        except TimeoutError:
            return None, f"no answer within {self.bound:g} s"
        except ClosedError:
            return None, f"it is gone: {self.forks.end_of(self.pids[rank])}"

    def crew(self, size: int, timeout: float, *, keep: bool = False) -> Crew:
        """Return the first ranks as a crew; `keep`: they keep their communicators from call to call."""
        kept = self.meet(size, timeout)

        def run(work: Communicate) -> list[object]:
            return self.call(
                kept if keep else self.meet(size, timeout), lambda rank: work(rank.number, rank.comms)
            )

        return Crew(size=size, run=run, place=device_of(self.kind), exact=not is_accelerator(self.kind))

    def close(self) -> None:
        """End the processes, whatever they do. Idempotent."""
        for channel in self.channels:
            channel.close()
        for pid in self.pids:
            if pid not in self.forks.ended():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.forks.wait(self.pids, TIMEOUTS.process_end)
        self.channels.clear()
        self.pids.clear()
