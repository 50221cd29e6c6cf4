"""A process that does what the suite of communicators asks for, over gloo or NCCL."""

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper.plan.plan import Plans
from piper.runtime.comm.base import Comms
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.nccl import NcclComms
from piper.workers.transport.channel import Channel
from piper.workers.transport.serialize import pack, unpack
from piper.workers.transport.sockets import ClosedError

Work = Callable[[int, Comms], object]
Kind = Literal["gloo", "nccl"]
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function to run as one device."""

    device: int
    plans: Plans
    kind: Kind
    timeout: float
    port: int  # of the store in which devices meet
    number: int  # of the communicators: tasks of one number share them
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a task returned, on the host, or the traceback of what it raised."""

    value: object = None
    trace: str | None = None


def main(descriptors: Sequence[int]) -> int:
    """Run one task after another."""
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"  # NCCL refuses two processes of one host on one GPU
    channel = Channel(socket.socket(fileno=descriptors[0]))
    number, comms = -1, None
    while True:
        try:
            task = cast(Task, unpack(cast(bytes, channel.recv())))
        except ClosedError:
            return 0
        try:
            if comms is None or task.number != number:
                number, comms = task.number, connected(task)
            answer = Answer(value=on_host(task.work(task.device, comms)))
        except Exception:  # noqa: BLE001  the test shows it
            comms, answer = None, Answer(trace=traceback.format_exc())
        channel.send(pack(answer))


def connected(task: Task) -> Comms:
    """Meet the processes that run the same task for other devices."""
    wait = timedelta(seconds=30)
    met = TCPStore(HOST, task.port, is_master=False, wait_for_workers=False, timeout=wait)
    store = PrefixStore(str(task.number), met)
    if task.kind == "nccl":
        torch.cuda.set_device(0)
        return NcclComms(task.plans, task.device, store, torch.device("cuda", 0), task.timeout)
    return GlooComms(task.plans, task.device, store, HOST, task.timeout)


def on_host(value: object) -> object:
    """Return a result with its tensors on the host."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(on_host, value))
    return value
