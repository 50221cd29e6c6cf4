"""`local` in a world that torchrun has started: rank 0 drives, and every rank is the worker of a device."""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from piper.errors import LaunchError, PiperError, WorkerError
from piper.launchers.accelerator import crowded
from piper.launchers.base import Resumed, StepResult, streams_of
from piper.launchers.driver import RemoteRun, unread_values
from piper.launchers.failures import ProcessStatus
from piper.launchers.freight import pack_setup
from piper.launchers.messages import (
    CODEC,
    PATIENCE,
    Assignment,
    RankAssignment,
    RankInfo,
    RankZeroResult,
    StoreAddress,
)
from piper.launchers.post import BackgroundWorker
from piper.launchers.processes import SharedFile, gone, running, stopped
from piper.launchers.rendezvous import DriverAddress, next_launch, open_door, own_address
from piper.launchers.store import store_on
from piper.launchers.transport.channel import Channel, ClosedError, Listener
from piper.launchers.transport.fork_server import StopWatch
from piper.launchers.transport.keys import check_key, given_key, new_launch, offered_key
from piper.launchers.transport.shared_memory import ProgressMarks, TensorEntry, joined, layout, share
from piper.launchers.watch import new_cells
from piper.launchers.wired import SocketWorkerGroup
from piper.launchers.worker_server import WorkerServer
from piper.launchers.world import RankEnvironment, check_size
from piper.runtime.record import Clock, Recording
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.trail import Mark
from piper.runtime.worker import Options

T = TypeVar("T")
SILENT = 8.0  # seconds after which a rank of another machine that sends no beat counts as lost


class TorchrunWorkerGroup(SocketWorkerGroup):
    """The ranks of a world: this process's own worker, and those that came in."""

    def __init__(self, program: ProgramLike, options: Options, world: RankEnvironment) -> None:
        super().__init__(program, options)
        self.world = world
        self.hellos: dict[int, RankInfo] = {}  # of the other ranks, by device
        self.cells: dict[int, memoryview] = {}  # where devices of this machine are in their plans
        self.post: BackgroundWorker | None = None
        self.seen: list[bytes] = []
        self.stops = StopWatch()

    def start(self) -> "TorchrunRun":
        """Let every rank in, and wait until all have met."""
        program, world = self.program, self.world
        values = {} if self.options.blank else initial_tensors(program.job)
        index = layout(values)
        own = own_address(world)
        meeting = store_on(own)
        setup = pack_setup(setup_of(program))
        width = streams_of(program.plans)
        self.cells[self.devices[0]] = new_cells(width)
        self._let_in(own, width)
        shares = program.device == "cuda" and crowded(world.nearby)

        def order(device: int, local: int, address: str) -> Assignment:
            return Assignment(
                device=device,
                local=local,
                meeting=StoreAddress(host=own, port=meeting.port, address=address),
                options=self.options,
                setup=setup,
                shares=shares,
            )

        with ExitStack() as held:
            memory = share(values, index)
            held.callback(os.close, memory)
            for device, hello in self.hellos.items():
                given = order(device, hello.local, hello.address)
                self.send(device, self._welcome(given, device, values, index, SharedFile.of(memory)))
            self._be_one(order(self.devices[0], world.local, own), values)
            self.gather(set(self.devices), max(PATIENCE, self.options.timeout))
        return TorchrunRun(program, self, unread_values(program, values))

    def _let_in(self, own: str, width: int) -> None:
        """Wait for all other ranks, and look where they are."""
        until, given = monotonic() + PATIENCE, given_key()
        with ExitStack() as held:
            launch = "" if given is not None else new_launch()
            key = given if given is not None else held.enter_context(offered_key(launch))
            listener = held.enter_context(Listener(own, key, self.options.timeout, CODEC))
            host, port = listener.address
            door = DriverAddress(host=host, port=port, launch=launch, width=width)
            open_door(self.world, next_launch(self.world), door)
            while len(self.hellos) < self.world.size - 1:
                if (newcomer := listener.accept(1.0)) is not None:
                    self._seat(*newcomer, width)
                if monotonic() > until:
                    raise self.absent()

    def _seat(self, rank: int, channel: Channel, width: int) -> None:
        try:
            hello = channel.recv()
        except (ClosedError, TimeoutError):
            channel.close()  # it ended just after it came in: another may still come in its place
            return
        if not isinstance(hello, RankInfo) or not 0 < rank < self.world.size:
            channel.close()
            return
        device = self.devices[rank]
        self.channels[device], self.hellos[device] = channel, hello
        if (marks := hello.marks.open()) is not None:
            self.cells[device] = ProgressMarks(marks, [device], width).of(device)
            os.close(marks)

    def absent(self) -> LaunchError:
        """The error of ranks that do not come."""
        missing = [str(rank) for rank, d in enumerate(self.devices) if rank and d not in self.hellos]
        return LaunchError(
            f"rank {', '.join(missing)} did not launch within {PATIENCE:g} s",
            by="launch",
            hint="every rank runs the same script: let all of them come to launch",
        )

    def _welcome(
        self,
        order: Assignment,
        device: int,
        values: Mapping[str, Tensor],
        index: dict[str, TensorEntry],
        spot: SharedFile,
    ) -> RankAssignment:
        near = device in self.cells
        return RankAssignment(
            order=order,
            values=index,
            shared=spot if near else None,
            memory=None if near else joined(values, index),
        )

    def _be_one(self, order: Assignment, values: Mapping[str, Tensor]) -> None:
        """Be the worker of the first device too."""
        here, there = socket.socketpair()
        self.channels[order.device] = Channel(here, self.options.timeout, codec=CODEC)
        cells = self.cells[order.device]
        self.post = BackgroundWorker(
            Channel(there, codec=CODEC), order.device, lambda: WorkerServer(order, values.__getitem__, cells)
        )

    def tell(self, told: RankZeroResult) -> None:
        """Let the scripts of the other ranks know what a method gave."""
        for device, hello in self.hellos.items():
            if hello.listens and device in self.channels and device not in self.silent:
                with suppress(ClosedError, OSError):  # it is dead or stopped, and the next call will show it
                    self.channels[device].send(told)

    def blamed(self) -> WorkerError:
        error = super().blamed()
        self.tell(failed("", error))  # before the channels are closed
        return error

    def ended(self) -> dict[int, str]:
        lost: dict[int, str] = {}
        for device in self.waiting & self.hellos.keys() - self.cells.keys():
            if monotonic() - self.heard[device] > SILENT:
                lost[device] = (
                    f"no sign of life for {SILENT:g} s: the process is stopped, or cannot be reached"
                )
        for device in self.silent & self.hellos.keys():
            process = self.hellos[device].process
            if device not in self.cells:
                lost[device] = "the process cannot be reached any more"
            elif gone(process):
                lost[device] = "the process has ended"
            elif not stopped(process):
                lost[device] = "the process has left the run"
        return lost

    def stopped(self) -> set[int]:
        near = {device: self.hellos[device].process for device in self.cells.keys() & self.hellos.keys()}
        return {device for device, pid in near.items() if self.stops.lasting(pid, stopped(pid))}

    def statuses(self) -> dict[int, ProcessStatus]:
        ended, found = self.ended(), dict[int, ProcessStatus]()
        for device in self.devices:
            near = device in self.cells
            process = self.hellos[device].process if device in self.hellos else os.getpid()
            found[device] = ProcessStatus(
                process=process,
                running=running(self.cells[device]) if near else (),
                ended=ended.get(device),
                stopped=near and device not in ended and stopped(process),
            )
        return found

    def moving(self) -> bool:
        if len(self.cells) < len(self.devices):
            return True  # not all can be seen; each ends its own waits
        before, self.seen = self.seen, [bytes(cells) for cells in self.cells.values()]
        return before != self.seen

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        if self.post is not None:
            self.post.leave()
            self.post = None


class TorchrunRun(RemoteRun):
    """A run whose results every rank gets."""

    crew: TorchrunWorkerGroup

    def _tell(self, method: str, act: Callable[[], T]) -> T:
        try:
            value = act()
        except PiperError as error:
            self.crew.tell(failed(method, error))
            raise
        self.crew.tell(RankZeroResult(method=method, value=value))
        return value

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""
        return self._tell("step", lambda: super(TorchrunRun, self).step(batch))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, by fully qualified name."""
        return self._tell("state_dict", super().state_dict)

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients in full, before clipping."""
        return self._tell("gradients", super().gradients)

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """What every chunk returned in the last step, by device."""
        return self._tell("trails", super().trails)

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """When the instructions of the recorded steps ran, by device."""
        return self._tell("recordings", super().recordings)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint."""
        act = super().save
        self._tell("save", lambda: act(path, data=data, wait=wait, keep=keep))

    def load(self, path: Path | str) -> Resumed:
        """Go on from a checkpoint."""
        return self._tell("load", lambda: super(TorchrunRun, self).load(path))

    def settle(self) -> None:
        """Wait until what is being saved is complete."""
        self._tell("settle", super().settle)


def failed(method: str, error: PiperError) -> RankZeroResult:
    """What to tell of an error."""
    notes = tuple(getattr(error, "__notes__", ()))
    return RankZeroResult(method=method, error=type(error).__name__, text=str(error), notes=notes)


@contextmanager
def launch_torchrun(program: ProgramLike, options: Options, world: RankEnvironment) -> Iterator[TorchrunRun]:
    """Start a program on the ranks of a world, of which this is the first."""
    crew = TorchrunWorkerGroup(program, options, world)
    check_size(world, len(crew.devices))
    check_key(world)
    with ExitStack() as held:
        held.callback(torch.set_num_threads, torch.get_num_threads())
        held.callback(crew.close)
        run = crew.start()
        held.callback(run.close)
        yield run
