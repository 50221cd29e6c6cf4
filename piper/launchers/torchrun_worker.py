"""The ranks of a torchrun job other than 0: each is a worker, and gives its script the results of rank 0."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from piper import errors
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.target import UndroppedError, UnwrittenError
from piper.errors import LaunchError, PiperError, WorkerError
from piper.launchers.base import Resumed, StepResult
from piper.launchers.evaluating import Batch
from piper.launchers.failures import failure_of
from piper.launchers.group import WorkerGroup
from piper.launchers.messages import CODEC, PATIENCE, Assignment, Heartbeat, RankInfo, RankZeroResult
from piper.launchers.processes import SharedFile, Termination
from piper.launchers.rank_environment import RankEnvironment, check_size
from piper.launchers.rendezvous import (
    HOW,
    DriverAddress,
    addresses,
    check_key,
    ending,
    find_address,
    key_of,
    next_launch,
    own_address,
)
from piper.launchers.run import Run
from piper.launchers.saves import checkpoints_of
from piper.launchers.sessions import Sessions
from piper.launchers.starter import Starter
from piper.launchers.torchrun_agents import serve_agent
from piper.launchers.transport.channel import Channel, ClosedError, connect
from piper.launchers.transport.nameless_files import map_marks, new_marks
from piper.launchers.transport.open_sockets import OpenSockets
from piper.launchers.transport.shared_memory import HeldValues, SharedValues
from piper.launchers.worker_server import WorkerServer
from piper.runtime.setup import Initial, ProgramLike
from piper.runtime.worker import Options

P = ParamSpec("P")
T = TypeVar("T")
CHANGES = ("step", "evaluate", "load")  # methods that every rank has to call when rank 0 does
KINDS = {kind.__name__: kind for kind in (UnwrittenError, UndroppedError, DamagedError)}
BEAT = 2.0  # seconds between two heartbeats of a worker that is at work
LEAVE = 5.0  # seconds that a worker may take to end when its sockets are shut
Hear = Callable[[RankZeroResult | None], None]  # None: the run has ended


@contextmanager
def beating(channel: Channel) -> Iterator[None]:
    """Send heartbeats inside the block, so that the driver knows that this process runs."""
    done = threading.Event()

    def beat() -> None:
        with suppress(ClosedError, OSError):  # the driver is gone, which the worker is about to see
            while not done.wait(BEAT):
                channel.send(Heartbeat())

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class BackgroundWorker:
    """A worker in a process that runs a script: one thread reads messages, another answers calls."""

    def __init__(
        self,
        channel: Channel,
        build: Callable[[Assignment], WorkerServer],
        hear: Hear | None = None,
        termination: Termination | None = None,
    ) -> None:
        """Start the threads.

        build: makes the worker from the first message. hear: is called with the results of rank 0.
        termination: whether the system has asked this process to end. None: that is left to the script.
        """
        self.termination = termination or Termination()
        self.channel, self.build, self.hear = channel, build, hear or (lambda result: None)
        self.calls: SimpleQueue[Assignment | tuple[str, object] | None] = SimpleQueue()
        self.sockets = OpenSockets()
        self.threads = [
            threading.Thread(target=act, name="worker", daemon=True) for act in (self._read, self._work)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        """Read messages until the driver is gone. Then end every wait of this process for another one."""
        with suppress(ClosedError, OSError):
            while True:
                message = self.channel.recv()
                if isinstance(message, RankZeroResult):
                    self.hear(message)
                else:
                    self.calls.put(cast("Assignment | tuple[str, object]", message))
        try:
            self.sockets.shut()
        finally:
            self.calls.put(None)
            self.hear(None)

    def _work(self) -> None:
        given = self.calls.get()
        if given is None:
            return
        assert isinstance(given, Assignment), "an assignment comes before any call"
        with suppress(ClosedError, OSError):
            try:
                with self.sockets.recording():
                    server = self.build(given)
            except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
                self.channel.send(failure_of(given.device, error))
                return
            try:
                self.channel.send(None)
                while (asked := cast("tuple[str, object] | None", self.calls.get())) is not None:
                    opens = self.sockets.recording() if asked[0] == "prepare" else nullcontext()
                    with beating(self.channel), opens:
                        answer = server.answer(*asked)
                    if self.termination.news():
                        self.channel.send(Heartbeat(leaving=True))
                    self.channel.send(answer)
            finally:
                server.close()

    def busy(self) -> bool:
        """Return whether the driver is still there."""
        return any(thread.is_alive() for thread in self.threads)

    def wait(self) -> None:
        """Wait until the driver is gone."""
        for thread in self.threads:
            thread.join()

    def leave(self) -> None:
        """End the worker, even if the driver does not answer."""
        with suppress(OSError):
            self.channel.end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(LEAVE)
        self.channel.close()


def join(
    world: RankEnvironment,
    address: DriverAddress,
    hear: Hear | None,
    termination: Termination | None = None,
) -> BackgroundWorker:
    """Connect to the driver of a launch as one of its workers."""
    key = key_of(world, address)
    try:
        channel = connect((address.host, address.port), key, world.rank, PATIENCE, CODEC)
    except ClosedError as error:
        raise LaunchError(
            "this rank and rank 0 do not know the same key",
            by=f"rank {world.rank}",
            facts={"at": f"{address.host}:{address.port}", "why": str(error)},
            hint=HOW,
        ) from error
    descriptor = new_marks(address.width)
    marks = map_marks(descriptor)
    channel.send(
        RankInfo(
            process=os.getpid(),
            address=own_address(world),
            local=world.local,
            marks=SharedFile.of(descriptor),
            listens=hear is not None,
        )
    )

    def build(given: Assignment) -> WorkerServer:
        os.close(descriptor)  # rank 0 has opened it by now, if it can
        return WorkerServer(given, values_of(given), marks)

    return BackgroundWorker(channel, build, hear, termination)


def values_of(given: Assignment) -> Initial:
    """Return the initial values that an assignment holds or names."""
    if isinstance(given.memory, Tensor):
        return HeldValues(given.memory.numpy(), given.values)
    assert given.memory is not None
    descriptor = given.memory.open()
    assert descriptor is not None, "rank 0 found this process on its machine"
    try:
        return SharedValues(descriptor, given.values)
    finally:
        os.close(descriptor)


def attend(world: RankEnvironment) -> int:
    """Be a worker of everything that rank 0 launches, until it is done. Return the exit code of this rank.

    torchrun passes SIGTERM and Ctrl-C on to every rank. Rank 0 acts on them: it saves, and needs this worker.
    """
    termination = Termination()
    termination.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    check_key(world)
    workers: list[BackgroundWorker] = []

    def leaves() -> bool:
        return termination.asked and not any(worker.busy() for worker in workers)

    for address in addresses(world, leaves):
        if address.agents:
            serve_agent(world, address)
            continue
        with suppress(OSError):  # rank 0 no longer listens
            workers.append(join(world, address, None, termination))
    for worker in workers:
        worker.wait()
    return ending(world)


def received(
    method: Callable[Concatenate[Run, P], T],
) -> Callable[Concatenate["TorchrunWorkerRun", P], T]:
    """Return a method of the same form that gives what the method returned or raised on rank 0."""

    def act(self: "TorchrunWorkerRun", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, self._next(method.__name__))

    return act


class NoStarter(Starter):
    """Starts nothing: rank 0 does."""

    def start(self, options: Options) -> WorkerGroup:
        raise AssertionError("rank 0 asks the workers")


class RankSessions(Sessions):
    """The worker of a rank other than 0, which ends with the run on rank 0."""

    waits = True  # for the end of the run on rank 0

    def __init__(
        self, program: ProgramLike, options: Options, worker: BackgroundWorker, threads: int
    ) -> None:
        """Keep a worker; `threads`: of a computation, when the worker has ended."""
        super().__init__(program, options, NoStarter(program))
        self.worker, self.threads = worker, threads

    def close(self) -> None:
        """End the worker. Idempotent."""
        try:
            if self.waits:
                self.worker.wait()
        finally:
            self.worker.leave()
            torch.set_num_threads(self.threads)


class TorchrunWorkerRun(Run):
    """A run on a rank other than 0: rank 0 slices the batch, and every rank gets its results."""

    drives = False

    def __init__(
        self,
        sessions: RankSessions,
        results: SimpleQueue[RankZeroResult | None],
    ) -> None:
        super().__init__(sessions)
        self.results, self.over = results, False

    def _next(self, method: str) -> object:
        """Return what a method returned on rank 0. Calls in between that only rank 0 makes are skipped."""
        while not self.over:
            result = self.results.get()
            if result is None:
                break
            if result.error is not None:
                raise error_of(result)
            if result.method == method:
                return result.value
            if result.method in CHANGES:
                raise LaunchError(
                    "the ranks do not do the same",
                    by="run",
                    facts={"rank 0": result.method, "here": method},
                    hint="call step, load, save and the like on every rank, in one order",
                )
        self.over = True
        raise WorkerError(
            "the run has ended on rank 0", by="run", hint="look at what rank 0 says; it may have failed"
        )

    def step(self, batch: Batch) -> StepResult:
        result = cast(StepResult, self._next("step"))
        self.sessions.done += 1
        return result

    evaluate = received(Run.evaluate)
    state_dict = received(Run.state_dict)
    gradients = received(Run.gradients)
    trails = received(Run.trails)
    recordings = received(Run.recordings)
    save = received(Run.save)
    optimizer_state = received(Run.optimizer_state)
    optimizer_groups = received(Run.optimizer_groups)
    set_optimizer_option = received(Run.set_optimizer_option)
    settle = received(Run.settle)

    def load(self, path: Path | str) -> Resumed:
        """Continue from the checkpoint that rank 0 has loaded."""
        resumed = cast(Resumed, self._next("load"))
        self.sessions.done = resumed.step
        return self.resumed(resumed, newest=True)

    def _prepare_saves(self) -> None:
        """Take the folder as it is: rank 0 looks at it."""
        self.saves_to = checkpoints_of(self.folder, self.program.job)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        cast(RankSessions, self.sessions).waits = error is None
        return super().__exit__(kind, error, trace)

    def close(self) -> None:
        """Wait until rank 0 has ended the run."""
        self.over = True
        super().close()


def error_of(result: RankZeroResult) -> PiperError:
    """Return the error that rank 0 has raised."""
    kind = KINDS.get(result.error or "") or getattr(errors, result.error or "", None)
    assert isinstance(kind, type) and issubclass(kind, PiperError), result.error
    error = kind.__new__(kind)
    error.args = (result.text,)
    for note in result.notes:
        error.add_note(note)
    return error


def launch_torchrun_worker(
    program: ProgramLike, options: Options, world: RankEnvironment
) -> TorchrunWorkerRun:
    """Join what rank 0 launches. The end of the run waits for its end on rank 0."""
    check_size(world, len(program.plans.devices))
    check_key(world)
    results: SimpleQueue[RankZeroResult | None] = SimpleQueue()
    threads = torch.get_num_threads()
    worker = join(world, find_address(world, next_launch(world)), results.put)
    return TorchrunWorkerRun(RankSessions(program, options, worker, threads), results)
