"""Ranks that make one call at the same time: processes of this machine, on its accelerators if it has any."""

import itertools
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import torch

from piper.runtime.accelerator import device_of, is_accelerator
from piper.runtime.comm.base import Comms
from piper.selftest.rank_process import Answer, Call, Meeting
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.serve import crowded
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import pack
from piper.workers.transport.sockets import ClosedError

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
