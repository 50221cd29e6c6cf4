"""Devices that run one function at once, each with its communicators: what the suite of communicators needs."""

import itertools
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from piper.plan.plan import Comm, Plans
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import pack, unpack
from piper.workers.transport.sockets import ClosedError
from tests.runtime.comm_process import Answer, Kind, Task, Work

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Devices that communicate."""

    size: int
    run: Callable[[Work], list[object]]  # on every device at once; the results in the order of the devices
    place: torch.device = HOST  # of the tensors that they communicate
    exact: bool = True  # sums are taken from the first device to the last, to the bit

    @property
    def devices(self) -> range:
        """Return the numbers of the devices."""
        return range(self.size)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return a tensor for each device, on the host."""
        rng = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=rng, dtype=torch.float64) for _ in self.devices]
        return [each.mul(1000).to(dtype) for each in drawn]

    def assert_sum(self, got: object, given: list[Tensor]) -> None:
        """Check a sum: its bits, or that it is as close as the sum in any order is."""
        assert isinstance(got, Tensor) and got.dtype == given[0].dtype and got.shape == given[0].shape
        if self.exact or not got.is_floating_point():
            assert torch.equal(got, first_to_last(given))
            return
        wide = torch.stack([value.double() for value in given])
        bound = self.size * torch.finfo(got.dtype).eps * wide.abs().sum(0)
        off = (got.double() - wide.sum(0)).abs()
        assert bool((off <= bound).all()), f"off by up to {(off / bound).max():.3g} of what rounding explains"


def first_to_last(given: list[Tensor]) -> Tensor:
    """Return the sum from the first to the last; short types are added in float32."""
    total = given[0].float() if given[0].dtype == torch.bfloat16 else given[0]
    for value in given[1:]:
        total = total + value.to(total.dtype)
    return total.to(given[0].dtype)


def plans_for(size: int) -> Plans:
    """Return plans with every kind of communicator between so many devices."""
    every, cut = tuple(range(size)), (size + 1) // 2
    ring = tuple((i, (i + 1) % size) for i in every)
    comms = (
        Comm(name="all", kind="groups", groups=(every,)),
        Comm(name="halves", kind="groups", groups=(every[:cut], every[cut:])),
        Comm(name="ring", kind="pairs", groups=ring),
    )
    return Plans(plans=(), comms={comm.name: comm for comm in comms}, buckets={}, seed=1.0, weighted=False)


class Processes:
    """Processes that run the tasks of a suite. Those that fail or do not answer in time are replaced."""

    def __init__(self, forks: ForkServer, most: int, bound: float) -> None:
        """Prepare for crews of up to `most` devices; `bound`: seconds that an answer may take."""
        self.forks, self.most, self.bound = forks, most, bound
        self.store, self.numbers = store_on(LOOPBACK), itertools.count()
        self.number = next(self.numbers)
        self.channels: list[Channel] = []
        self.pids: list[int] = []

    def start(self) -> None:
        """Start the processes, if there are none."""
        while len(self.channels) < self.most:
            here, there = socket.socketpair()
            with there:
                self.pids.append(self.forks.fork([there.fileno()]))
            self.channels.append(Channel(here, self.bound))

    def close(self) -> None:
        """End the processes, whatever they do."""
        for channel in self.channels:
            channel.close()
        for pid in self.pids:
            if pid not in self.forks.ended():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.forks.wait(self.pids, 10.0)
        self.channels.clear()
        self.pids.clear()

    def crew(
        self, size: int, kind: Kind, timeout: float, *, keep: bool = False, place: torch.device = HOST
    ) -> Crew:
        """Return a crew of the first processes; `keep`: tasks use the communicators of the task before."""
        plans = plans_for(size)

        def run(work: Work) -> list[object]:
            if not keep:
                self.number = next(self.numbers)
            self.start()
            for device, channel in enumerate(self.channels[:size]):
                task = Task(
                    device=device, plans=plans, kind=kind, timeout=timeout, port=self.store.port,
                    number=self.number, work=work,
                )  # fmt: skip
                channel.send(pack(task))
            answers = [self._answer(device) for device in range(size)]
            if any(answer.trace for answer in answers):
                self.close()
                self.number = next(self.numbers)
                told = (f"device {d}: {answer.trace or 'done'}" for d, answer in enumerate(answers))
                raise AssertionError("not every device has done its task\n" + "\n".join(told))
            return [answer.value for answer in answers]

        self.number = next(self.numbers)
        return Crew(size=size, run=run, place=place, exact=kind == "gloo")

    def _answer(self, device: int) -> Answer:
        try:
            return cast(Answer, unpack(cast(bytes, self.channels[device].recv())))
        except TimeoutError:
            return Answer(trace=f"no answer within {self.bound:g} s")
        except ClosedError:
            return Answer(trace=f"it is gone: {self.forks.end_of(self.pids[device])}")
