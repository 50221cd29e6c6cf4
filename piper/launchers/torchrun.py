"""`local` under torchrun: rank 0 drives, and every rank is the worker of a device."""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import wraps
from time import monotonic
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from piper.errors import PiperError, WorkerError
from piper.launchers.driver import SocketWorkerGroup
from piper.launchers.failures import private_marks
from piper.launchers.messages import CODEC, PATIENCE, Assignment, RankInfo, RankZeroResult, StoreAddress
from piper.launchers.processes import SharedFile, gone, stopped
from piper.launchers.rank_environment import RankEnvironment, check_size
from piper.launchers.rendezvous import (
    DriverAddress,
    check_key,
    given_key,
    new_launch,
    next_launch,
    offered_key,
    own_address,
    publish_address,
    ranks_absent,
    store_on,
)
from piper.launchers.run import Run
from piper.launchers.sessions import Sessions
from piper.launchers.starter import GivenGroup
from piper.launchers.torchrun_worker import BackgroundWorker
from piper.launchers.transport.channel import Channel, ClosedError, Listener
from piper.launchers.transport.nameless_files import map_marks
from piper.launchers.transport.shared_memory import TensorEntry, joined, share
from piper.launchers.worker_server import WorkerServer, crowded
from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

P = ParamSpec("P")
T = TypeVar("T")
SILENT = 8.0  # seconds after which a rank of another machine that sends no heartbeat counts as lost


class TorchrunWorkerGroup(SocketWorkerGroup):
    """The ranks of a torchrun job: the worker in this process, and those that connect to it."""

    def __init__(self, program: ProgramLike, options: Options, world: RankEnvironment) -> None:
        super().__init__(program, options)
        self.world, self.threads_before = world, torch.get_num_threads()
        self.ranks: dict[int, RankInfo] = {}  # the other ranks, by device
        self.worker: BackgroundWorker | None = None

    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, held: ExitStack
    ) -> None:
        first = self.devices[0]
        self.own = own_address(self.world)
        self.store = store_on(self.own)
        self.processes[first], self.marks[first] = os.getpid(), private_marks(width)
        self._accept_ranks(width)
        memory = share(weights, index)
        held.callback(os.close, memory)
        self.memory = SharedFile.of(memory)
        here, there = socket.socketpair()
        self.channels[first] = Channel(here, self.options.timeout, codec=CODEC)
        self.worker = BackgroundWorker(
            Channel(there, codec=CODEC),
            lambda given: WorkerServer(given, weights.__getitem__, self.marks[first]),
        )

    def _accept_ranks(self, width: int) -> None:
        """Wait until every other rank has connected."""
        until, given = monotonic() + PATIENCE, given_key()
        with ExitStack() as held:
            launch = "" if given is not None else new_launch()
            key = given if given is not None else held.enter_context(offered_key(launch))
            listener = held.enter_context(Listener(self.own, key, self.options.timeout, CODEC))
            host, port = listener.address
            address = DriverAddress(host=host, port=port, launch=launch, width=width, agents=False)
            publish_address(self.world, next_launch(self.world), address)
            while len(self.ranks) < self.world.size - 1:
                if (arrived := listener.accept(1.0)) is not None:
                    self._accept_rank(*arrived)
                if monotonic() > until:
                    missing = [n for n, device in enumerate(self.devices) if n and device not in self.ranks]
                    raise ranks_absent(missing)

    def _accept_rank(self, rank: int, channel: Channel) -> None:
        try:
            info = channel.recv()
        except (ClosedError, TimeoutError):
            info = None  # it ended just after it connected: another process may take its place
        if not isinstance(info, RankInfo) or not 0 < rank < self.world.size:
            channel.close()
            return
        device = self.devices[rank]
        self.channels[device], self.ranks[device], self.processes[device] = channel, info, info.process
        if (marks := info.marks.open()) is not None:
            self.marks[device] = map_marks(marks)
            os.close(marks)

    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        info = self.ranks.get(device)
        near = device in self.marks
        return Assignment(
            device=device,
            local=self.world.local if info is None else info.local,
            store=StoreAddress(
                host=self.own, port=self.store.port, own=self.own if info is None else info.address
            ),
            options=self.options,
            setup=setup,
            shares=is_accelerator(self.program.device) and crowded(self.world.nearby),
            values=index,
            memory=self.memory if near else joined(weights, index),
        )

    def publish(self, result: RankZeroResult) -> None:
        """Send the result of a method to the scripts of the other ranks."""
        for device, info in self.ranks.items():
            if info.listens and device in self.channels and device not in self.silent:
                with suppress(ClosedError, OSError):  # it is dead or stopped, and the next call will show it
                    self.channels[device].send(result)

    def blamed(self) -> WorkerError:
        error = super().blamed()
        self.publish(failed("", error))  # before the channels are closed
        return error

    def ended(self) -> dict[int, str]:
        lost: dict[int, str] = {}
        for device in self.waiting & self.ranks.keys() - self.marks.keys():
            if monotonic() - self.heard[device] > SILENT:
                lost[device] = (
                    f"no sign of life for {SILENT:g} s: the process is stopped, or cannot be reached"
                )
        for device in self.silent & self.ranks.keys():
            process = self.processes[device]
            if device not in self.marks:
                lost[device] = "the process cannot be reached any more"
            elif gone(process):
                lost[device] = "the process has ended"
            elif not stopped(process):
                lost[device] = "the process has left the run"
        return lost

    def moving(self) -> bool:
        # The marks of other machines cannot be read. Each worker there ends its own waits.
        return super().moving() or len(self.marks) < len(self.devices)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        if self.worker is not None:
            self.worker.leave()
            self.worker = None
        torch.set_num_threads(self.threads_before)


def published(
    method: Callable[Concatenate["TorchrunRun", P], T],
) -> Callable[Concatenate["TorchrunRun", P], T]:
    """Send what a method of the run returns or raises to the other ranks, where it then does the same."""

    @wraps(method)
    def act(self: "TorchrunRun", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            value = method(self, *args, **kwargs)
        except PiperError as error:
            self.group.publish(failed(method.__name__, error))
            raise
        self.group.publish(RankZeroResult(method=method.__name__, value=value))
        return value

    return act


class TorchrunRun(Run):
    """A run whose results every rank gets."""

    def __init__(self, group: TorchrunWorkerGroup) -> None:
        super().__init__(Sessions(group.program, group.options, GivenGroup(group)))
        self.group = group
        self.sessions.begin()

    step = published(Run.step)
    evaluate = published(Run.evaluate)
    state_dict = published(Run.state_dict)
    gradients = published(Run.gradients)
    optimizer_state = published(Run.optimizer_state)
    optimizer_groups = published(Run.optimizer_groups)
    set_optimizer_option = published(Run.set_optimizer_option)
    trails = published(Run.trails)
    recordings = published(Run.recordings)
    save = published(Run.save)
    load = published(Run.load)
    settle = published(Run.settle)


def failed(method: str, error: PiperError) -> RankZeroResult:
    """Return the message that reports an error."""
    notes = tuple(getattr(error, "__notes__", ()))
    return RankZeroResult(method=method, error=type(error).__name__, text=str(error), notes=notes)


def launch_torchrun(program: ProgramLike, options: Options, world: RankEnvironment) -> TorchrunRun:
    """Start a program on the ranks of a torchrun job, of which this is rank 0."""
    check_size(world, len(program.plans.devices))
    check_key(world)
    return TorchrunRun(TorchrunWorkerGroup(program, options, world))
