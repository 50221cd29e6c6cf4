"""Processes that are ranks of a crew: they make one call at the same time, and how fast they communicate."""

import itertools
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from time import perf_counter
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from piper.plan.plan import Comm, Plans
from piper.runtime.accelerator import device_of, is_accelerator
from piper.runtime.comm.base import Comms, Form
from piper.runtime.comm.gloo import GlooComms
from piper.simulate.measured import Line, line_through
from piper.workers import serve
from piper.workers.processes import ClosedError
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.serve import crowded
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import pack, unpack

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
    """One rank of a meeting: its number, its communicators, and the step that it takes again and again."""

    def __init__(self, number: int, meeting: Meeting) -> None:
        self.number, self.meeting, self.size = number, meeting, meeting.size
        self.device = device_of(meeting.kind)
        self.step: Callable[[], Tensor | None] | None = None  # of torch's side, where one was started
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
            return serve.BETWEEN[self.device.type](plans, self.number, self.store, self.device, timeout)
        patience = timedelta(seconds=TIMEOUTS.meeting)  # to connect: some ranks may be late
        return GlooComms(plans, self.number, self.store, LOOPBACK, timeout, patience=patience)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if is_accelerator(self.device):
            torch.accelerator.synchronize()


Call = Callable[[Rank], object]
Answer = tuple[object, str | None]  # what a call returned, and the traceback of what it raised


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
            answer: Answer = call(rank), None
            rank.wait()  # what fails on the device is raised here
        except Exception:  # noqa: BLE001  it is sent to the process that asked, which raises
            rank, answer = None, (None, traceback.format_exc())
        channel.send(answer)


Communicate = Callable[[int, Comms], object]


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
            raise RuntimeError("not every rank has done its task\n" + "\n".join(traces))
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
        self.forks.end(self.pids)
        self.channels.clear()
        self.pids.clear()


SIZES = {False: (2**10, 2**18, 2**21), True: (2**12, 2**22, 2**26)}  # bytes of a transfer, by `Meeting.apart`
LARGE = {False: 2**22, True: 2**28}  # bytes of the tensor of a collective, likewise
ROUNDS = 7  # and one more before, which does not count
FLOAT = torch.float32


def timed(rank: Rank, act: Callable[[], object]) -> list[float]:
    """Return the seconds of some rounds, each of which all ranks begin together."""
    group, token = rank.comms.group("all"), torch.zeros(1, device=rank.device)
    times = []
    for _ in range(ROUNDS + 1):
        group.all_reduce(token)
        rank.wait()
        begin = perf_counter()
        act()
        rank.wait()
        times.append(perf_counter() - begin)
    return times[1:]


def transfer_times(rank: Rank, source: int, nbytes: int) -> list[float]:
    """Send a tensor from a rank to the next. Return the seconds that this rank takes."""
    value, form = torch.zeros(nbytes, dtype=torch.uint8, device=rank.device), Form((nbytes,), torch.uint8)
    acts = {
        source: lambda: rank.comms.outgoing("ring").send(value),
        (source + 1) % rank.size: lambda: rank.comms.incoming("ring").recv(form),
    }
    return timed(rank, acts.get(rank.number, lambda: None))


def measured_links(processes: Processes, meeting: Meeting) -> Iterator[Line]:
    """Measure the way from each rank to the next: the seconds to begin, and those of each byte."""
    for source in range(meeting.size):
        points = []
        for nbytes in SIZES[meeting.apart]:
            every = processes.call(meeting, partial(transfer_times, source=source, nbytes=nbytes))
            received = cast("list[list[float]]", every)[(source + 1) % meeting.size]
            points.append((float(nbytes), min(received)))  # other work can only slow it down
        yield line_through(points)


def collective_times(rank: Rank, name: str) -> list[float]:
    """Return the seconds of a collective on a large tensor of equal parts on this rank."""
    part = LARGE[rank.meeting.apart] // FLOAT.itemsize // rank.size
    whole = torch.zeros(part * rank.size, dtype=FLOAT, device=rank.device)
    group, parts = rank.comms.group("all"), [part] * rank.size
    acts: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part),
        "all_gather": lambda: group.all_gather(whole.split(part)[group.rank], whole),
        "all_to_all": lambda: group.all_to_all(whole, parts, parts),
        "shift": lambda: group.shift(whole, 1),
        "broadcast": lambda: group.broadcast(whole),
    }
    return timed(rank, acts[name])


def measured_collectives(processes: Processes, meeting: Meeting) -> dict[str, tuple[float, float]]:
    """Return every collective's seconds and bytes per second through each link, the "bus bandwidth"."""
    others = (meeting.size - 1) / meeting.size  # the part of the tensor that belongs to other ranks
    through_link = {"all_reduce": 2 * others, "shift": 1.0, "broadcast": 1.0}
    through_link |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), others)
    measured: dict[str, tuple[float, float]] = {}
    for name, share in through_link.items():
        every = cast("list[list[float]]", processes.call(meeting, partial(collective_times, name=name)))
        spent = min(map(max, zip(*every, strict=True)))
        measured[name] = spent, share * LARGE[meeting.apart] / spent
    return measured
