"""A process that is one rank of several: it makes the calls that it is asked for, over gloo or NCCL."""

import socket
import traceback
from collections.abc import Callable, Sequence
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
from piper.workers.rendezvous import LOOPBACK
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.serialize import unpack
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
