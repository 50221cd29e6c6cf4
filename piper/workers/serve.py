"""A worker's side of a launch: one device that runs its plan, answers calls and reports failures."""

import json
import os
import queue
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

import piper.experts  # noqa: F401  captured code calls its operators
from piper.checkpoint.load import BackgroundSaver
from piper.checkpoint.move_state import move_state
from piper.ir.ids import Tags
from piper.plan.plan import Plans
from piper.runtime.accelerator import KINDS, accelerators, is_accelerator
from piper.runtime.comm.base import Comms, speaks_in
from piper.runtime.comm.gloo import GlooComms, GlooTransport
from piper.runtime.comm.nccl import NcclComms
from piper.runtime.comm.staged import StagedComms
from piper.runtime.recorders import DeviceProfile, OutputKey
from piper.runtime.setup import Initial, Setup, blank_values
from piper.runtime.worker import Sums, Worker
from piper.workers.blame import Watcher, failure_of
from piper.workers.messages import CODEC, Assignment, BatchSlice, Leaving, unpack_setup
from piper.workers.processes import ClosedError, Termination, map_marks
from piper.workers.rendezvous import LOOPBACK
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel, connect
from piper.workers.transport.serialize import shared
from piper.workers.transport.versions import WorkerVersions

BETWEEN: Mapping[str, Callable[[Plans, int, Store, torch.device, float], Comms]] = {"cuda": NcclComms}
# ^ the communicators between accelerators, by kind
ProgramBatch = tuple[int, Mapping[str, BatchSlice | Tensor]]
# ^ the number of a program, and a device's rows of a batch, with the tables of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a call of workers needs beyond an answer from each."""

    together: bool = False  # devices wait for each other, so each of them answers in a thread of its own
    at_home: bool = False  # the state as the first program holds it
    loads: bool = False  # it changes the values of buffers
    whole: str = ""  # all devices of the job. Why a device that runs alone refuses it


NEEDS: Mapping[str, Needs] = {  # by the name of the method of `WorkerAnswers`
    "step": Needs(together=True),
    "evaluate": Needs(together=True),
    "protect": Needs(together=True),
    "come_home": Needs(together=True),
    "load": Needs(at_home=True, loads=True),
    "adopt": Needs(at_home=True, loads=True),
    "restore": Needs(at_home=True, loads=True),
    "owned": Needs(at_home=True, whole="there is no full state"),
    "gradients": Needs(whole="there are no gradients of a whole job"),
    "optimizer_state": Needs(at_home=True, whole="there is no optimizer state of a whole job"),
}


def needs_of(call: Callable[..., object]) -> Needs:
    """Return what a call of workers needs, which is given as the method that answers it."""
    return NEEDS.get(call.__name__, Needs())


class WorkerAnswers(BackgroundSaver):
    """Answers the calls of a driver. A call has the name of its method, and one argument."""

    def __init__(self, worker: Worker, versions: WorkerVersions | None = None) -> None:
        """Answer for a worker; `versions`: its memory for copies of the state. None: it keeps none."""
        super().__init__(worker)
        self.versions = versions

    def step(self, given: ProgramBatch) -> Sums:
        """Train on this device's rows of a batch."""
        number, fields = given
        move_state(self.worker, number)
        sums = self.worker.step(fields, number)
        if self.versions is not None and self.versions.holders.state is None:  # else instructions copy it
            self.versions.write()
        return sums

    def evaluate(self, given: ProgramBatch) -> Sums:
        """Evaluate on this device's rows of a batch."""
        move_state(self.worker, given[0])
        return self.worker.evaluate(*given)

    def predictions(self, number: int) -> dict[Tags, Tensor]:
        """Return what this device predicted in the last evaluation by a program, by microbatch."""
        recorder = self.worker.others[number].predictions
        return {} if recorder is None else recorder.take()

    def come_home(self, _: object = None) -> None:
        """Hold the state as the first program does. All devices do so at once."""
        move_state(self.worker, 0)

    def protect(self, _: object = None) -> None:
        """Copy the state into memory that outlives this worker."""
        assert self.versions is not None
        self.versions.write()

    def restore(self, step: int) -> None:
        """Take the state after a step from memory."""
        assert self.versions is not None
        self.versions.restore(step)

    def owned(self, buckets: Sequence[str]) -> dict[str, Tensor]:
        """Return this device's part of some buckets, copied: torch cannot resize what NumPy has seen."""
        return {name: self.worker.owned(name).detach().to("cpu", copy=True) for name in buckets}

    def gradients(self, buckets: Sequence[str]) -> dict[str, Tensor | None]:
        """Return the last step's gradients of this device's part of some buckets."""
        return {name: self.worker.gradient(name) for name in buckets}

    def optimizer_options(self, _: object) -> list[tuple[bool, dict[str, object]]]:
        """Return of the optimizer's groups whether this device trains some of each, and the options."""
        return self.worker.holder.options()

    def set_optimizer_option(self, given: tuple[int, str, float]) -> None:
        """Set an option of one of the optimizer's groups."""
        self.worker.holder.set_option(*given)

    def optimizer_state(self, asked: tuple[str, Sequence[str]]) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """Return what the optimizer keeps under a key for this device's part of some buckets."""
        key, buckets = asked
        return {name: self.worker.env.state.kept(name, key) for name in buckets}

    def reached(self, _: object) -> set[str]:
        """Return the parameters that have gradients."""
        return self.worker.env.state.reached

    def buffers(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what this device holds of the named buffers that it uses."""
        return self.worker.buffers(names)

    def trail(self, _: object) -> dict[OutputKey, Tensor]:
        """Return what every chunk returned in the last step."""
        trail = self.worker.latest.trail
        return {} if trail is None else trail.kept

    def record(self, _: object) -> DeviceProfile | None:
        """Return when the instructions of the recorded steps ran, on this worker's clock."""
        return None if self.worker.recorder is None else self.worker.recorder.take()

    def clock(self, _: object) -> float:
        """Return the time of this worker's clock."""
        return monotonic()


class WorkerServer(WorkerAnswers):
    """A worker that answers calls. Its first failure is its answer, even while other streams still wait."""

    def __init__(self, given: Assignment, initial: Initial, marks: memoryview) -> None:
        """Build the worker of a device; `marks`: the progress of each stream, for the driver to read."""
        self.device, self.given = given.device, given
        torch.set_num_threads(given.options.threads)
        setup = unpack_setup(given.setup)
        if is_accelerator(setup.device):
            take_one(setup.device.type, given.local)
            if self.by_sockets:
                name_as_machine(given.device, alone=given.host == LOOPBACK)
        self.answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        accelerator = setup.device if is_accelerator(setup.device) else None
        self.watcher = Watcher(self.device, marks, self.answers.put, accelerator)
        self.transport: GlooTransport | None = None  # of all programs, where gloo is used
        comms = self._comms(setup, "")
        worker = Worker(
            setup,
            self.device,
            comms,
            blank_values(setup.outline) if given.options.blank else initial,
            given.options,
            watch=self.watcher.watch,
            show=self.watcher.show,
        )
        super().__init__(worker, None if given.versions is None else WorkerVersions(worker, given.versions))
        self.steps = ThreadPoolExecutor(1, "step")

    def _comms(self, setup: Setup, prefix: str) -> Comms:
        """Return the communicators of a program; `prefix`: of its keys in the common store."""
        given = self.given
        patience = timedelta(seconds=max(given.options.timeout, TIMEOUTS.meeting))
        met = TCPStore(given.host, given.port, is_master=False, wait_for_workers=False, timeout=patience)
        store = PrefixStore(prefix, met) if prefix else met
        timeout = given.options.timeout
        if is_accelerator(setup.device) and (self.by_sockets or not given.shares):
            return BETWEEN[setup.device.type](setup.plans, self.device, store, setup.device, timeout)
        self.transport = self.transport or GlooTransport(given.own)
        gloo = GlooComms(setup.plans, self.device, store, self.transport, timeout, patience=patience)
        return StagedComms(gloo, setup.device) if is_accelerator(setup.device) else gloo

    @property
    def by_sockets(self) -> bool:
        """Return whether NCCL connects workers of one accelerator."""
        return self.given.shares and self.given.options.share == "nccl"

    def step(self, given: ProgramBatch) -> Sums:
        return replace(super().step(given), busy=self.watcher.take_busy())

    def prepare(self, given: tuple[int, bytes, Mapping[str, Tensor], bool]) -> None:
        """Take another program, with buffers that this worker does not hold, which trains or evaluates."""
        number, packed, buffers, trains = given
        setup = unpack_setup(packed)
        programs = (self.worker, *self.worker.others.values())
        known = next((one for one in programs if speaks_in(setup.plans, one.setup.plans)), None)
        comms = self._comms(setup, f"program-{number}") if known is None else known.env.comms
        self.worker.prepare(number, setup, comms, buffers.__getitem__, trains=trains)

    def _watched(self, act: Callable[[], object]) -> object:
        """Return what a function returns in the thread of steps, or the first failure of any stream."""

        def run() -> None:
            try:
                self.answers.put(act())
            except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
                self.watcher.fail(error)

        self.steps.submit(run)
        return self.answers.get()

    def answer(self, call: str, argument: object) -> object:
        """Answer a call. A failure is an answer too."""
        try:
            act = partial(getattr(self, call), argument)
            return self._watched(act) if NEEDS.get(call, Needs()).together else act()
        except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
            return failure_of(self.device, error)


def main(descriptors: Sequence[int]) -> int:
    """Be a worker: receive an assignment, then answer the calls of the driver until it is gone.

    descriptors: the way to the driver (a socket or a ticket), the marks of progress, and the initial values.
    """
    way, marks, values = descriptors
    termination = Termination()
    termination.install()
    if stat.S_ISSOCK(os.fstat(way).st_mode):
        channel = Channel(socket.socket(fileno=way), codec=CODEC)
    else:  # a ticket names the address of the driver, with its key
        host, port, key, device = json.loads(os.pread(way, os.fstat(way).st_size, 0))
        channel = connect((host, port), bytes.fromhex(key), device, TIMEOUTS.meeting, CODEC)
    with suppress(ClosedError):
        given = cast(Assignment, channel.recv())
        sys.path[:] = given.path or sys.path
        try:
            server = WorkerServer(given, shared(values).__getitem__, map_marks(marks))
        except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
            channel.send(failure_of(given.device, error))
            return 0
        serve(channel, server, termination)
    return 0


def serve(channel: Channel, server: WorkerServer, termination: Termination) -> NoReturn:
    """Report that a worker is ready, and answer calls until the driver is gone."""
    channel.send(None)
    while True:
        call, argument = cast("tuple[str, object]", channel.recv())
        answer = server.answer(call, argument)
        if termination.news():
            channel.send(Leaving())
        try:
            channel.send(answer)
        except TypeError as error:  # a message cannot hold the answer: nothing of it was sent
            channel.send(failure_of(server.device, error))


def crowded(workers: int) -> bool:
    """Return whether workers of this machine have to share its accelerators."""
    return workers > accelerators()


def take_one(kind: str, local: int) -> None:
    """Let this process see one accelerator only, as the first: the one that captured code names.

    It must not have looked for accelerators yet. Only those that are visible to it are counted.
    """
    visible = KINDS[kind].visible
    listed = os.environ.get(visible)
    numbers = listed.split(",") if listed else [str(i) for i in range(accelerators())]
    os.environ[visible] = numbers[local % len(numbers)]
    for name, value in KINDS[kind].environment.items():
        os.environ.setdefault(name, value)


def name_as_machine(device: int, *, alone: bool) -> None:
    """Let NCCL take this worker for a machine of its own: it refuses two of one machine on one accelerator.

    NCCL must not have been used yet. It then talks over sockets. alone: all workers are on this machine.
    """
    os.environ["NCCL_HOSTID"] = f"device-{device}"
    # A transfer takes as little of the shared accelerator as it can: products that run as clusters of thread
    # blocks were a third slower beside a receive of several channels. Sockets need no more than one.
    usual = {"NCCL_IB_DISABLE": "1", "NCCL_MAX_P2P_NCHANNELS": "1", "NCCL_NCHANNELS_PER_NET_PEER": "1"}
    # One thread for each connection: with several they fill the host's cores, with none collectives wait.
    usual |= {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "1"}
    if alone:
        usual["NCCL_SOCKET_IFNAME"] = "lo"
    for name, value in usual.items():
        os.environ.setdefault(name, value)
