"""A process that does what the suite of communicators asks for, over gloo."""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper.plan.plan import Plans
from piper.runtime.comm.base import Comms
from piper.runtime.comm.gloo import GlooComms
from piper.workers.transport.channel import Channel
from piper.workers.transport.serialize import pack, unpack
from piper.workers.transport.sockets import ClosedError

Work = Callable[[int, Comms], object]
Task = tuple[
    int, Plans, float, int, int, Work
]  # device, plans, timeout, the store's port, a number, what to do
HOST = "127.0.0.1"


def main(descriptors: Sequence[int]) -> int:
    """Do one task after another, each with communicators of its own."""
    channel = Channel(socket.socket(fileno=descriptors[0]))
    while True:
        try:
            device, plans, timeout, port, number, work = cast(Task, unpack(cast(bytes, channel.recv())))
        except ClosedError:
            return 0
        wait = timedelta(seconds=30)
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=wait)
        comms = GlooComms(plans, device, PrefixStore(str(number), store), HOST, timeout)
        channel.send(pack(work(device, comms)))
