"""A worker's side of a launch: one device that runs its plan, answers calls and reports failures."""

import os
import queue
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

import piper.experts  # noqa: F401  captured code calls its operators
from piper.checkpoint.background import BackgroundSaver, Done
from piper.checkpoint.load import blank_values
from piper.launchers.failures import Failure, Watcher, failure_of
from piper.launchers.messages import (
    CODEC,
    PATIENCE,
    Assignment,
    Call,
    Heartbeat,
    Preparation,
    ProgramBatch,
    unpack_setup,
)
from piper.launchers.processes import Termination
from piper.launchers.transport.channel import Channel, ClosedError
from piper.launchers.transport.nameless_files import map_marks
from piper.launchers.transport.shared_memory import SharedValues
from piper.launchers.transport.versions import WorkerVersions
from piper.plan.divided import Share
from piper.runtime.comm.base import Comms, speaks_in
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.nccl import NcclComms
from piper.runtime.comm.staged import StagedComms
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import DeviceProfile
from piper.runtime.setup import Initial, Setup
from piper.runtime.worker import Sums, Worker

VISIBLE = "CUDA_VISIBLE_DEVICES"


class WorkerServer:
    """A worker that answers calls. Its first failure is its answer, even while other streams still wait."""

    def __init__(self, given: Assignment, initial: Initial, marks: memoryview) -> None:
        """Build the worker of a device; `marks`: the progress of each stream, for the driver to read."""
        self.device, self.given = given.device, given
        torch.set_num_threads(given.options.threads)
        setup = unpack_setup(given.setup)
        if setup.device.type == "cuda":
            take_one(given.local)
        self.answers: queue.SimpleQueue[Sums | Failure] = queue.SimpleQueue()
        self.watcher = Watcher(self.device, marks, self.answers.put, cuda=setup.device.type == "cuda")
        comms = self._comms(setup, "")
        self.worker = Worker(
            setup,
            self.device,
            comms,
            blank_values(setup.outline) if given.options.blank else initial,
            given.options,
            on_failure=comms.abort,
            watch=self.watcher.watch,
        )
        self.saver = BackgroundSaver(self.worker)
        self.versions = None if given.versions is None else WorkerVersions(self.worker, given.versions)
        self.trouble: Failure | None = None  # of what was done between two calls
        self.failed = False  # the last call
        self.thread = ThreadPoolExecutor(1, "step")

    def _comms(self, setup: Setup, prefix: str) -> Comms:
        """Return NCCL between accelerators, and gloo on hosts or where an accelerator is shared.

        prefix: of the keys by which the workers of one program meet in the store that all programs share.
        """
        given = self.given
        at, patience = given.store, timedelta(seconds=max(given.options.timeout, PATIENCE))
        met = TCPStore(at.host, at.port, is_master=False, wait_for_workers=False, timeout=patience)
        store = PrefixStore(prefix, met) if prefix else met
        timeout = given.options.timeout
        if setup.device.type == "cuda" and not given.shares:
            return NcclComms(setup.plans, self.device, store, setup.device, timeout)
        gloo = GlooComms(setup.plans, self.device, store, at.own, timeout, patience=patience)
        return StagedComms(gloo, setup.device) if setup.device.type == "cuda" else gloo

    def step(self, given: ProgramBatch) -> Sums | Failure:
        """Train on this device's rows of a batch."""
        answer = self._watched(lambda: self.worker.step(given.fields, given.number))
        return replace(answer, busy=self.watcher.take_busy()) if isinstance(answer, Sums) else answer

    def prepare(self, given: Preparation) -> None:
        """Take another program. Meet the other workers for it if it has other communicators."""
        setup, comms = unpack_setup(given.setup), self.worker.env.comms
        if not speaks_in(setup.plans, self.worker.setup.plans):
            comms = self._comms(setup, f"program-{given.number}")
        initial = given.buffers.__getitem__
        self.worker.prepare(given.number, setup, comms, initial, comms.abort, trains=given.trains)

    def evaluate(self, given: ProgramBatch) -> Sums | Failure:
        """Evaluate on this device's rows of a batch."""
        return self._watched(lambda: self.worker.evaluate(given.number, given.fields))

    def _watched(self, act: Callable[[], Sums]) -> Sums | Failure:
        """Run a plan in the thread of steps. A failure of any stream is the answer, while others wait."""

        def run() -> None:
            try:
                self.answers.put(act())
            except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
                self.watcher.fail(error)

        self.thread.submit(run)
        return self.answers.get()

    def owned(self, buckets: Sequence[str]) -> dict[str, Tensor]:
        """Return this device's part of some buckets."""
        return {name: self.worker.owned(name) for name in buckets}

    def gradients(self, buckets: Sequence[str]) -> dict[str, Tensor | None]:
        """Return the last step's gradients of this device's part of some buckets."""
        return {name: self.worker.gradient(name) for name in buckets}

    def optimizer_options(self, _: object) -> list[dict[str, object]] | None:
        """Return the options of the optimizer's groups. None: this device trains nothing."""
        return self.worker.env.state.options()

    def set_optimizer_option(self, given: tuple[int, str, float]) -> None:
        """Set an option of one of the optimizer's groups."""
        self.worker.env.state.set_option(*given)

    def optimizer_state(self, asked: tuple[str, Sequence[str]]) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """Return what the optimizer keeps under a key for this device's part of some buckets."""
        key, buckets = asked
        return {name: self.worker.env.state.kept(name, key) for name in buckets}

    def reached(self, _: object) -> set[str]:
        """Return the parameters that have gradients."""
        return self.worker.env.state.reached

    def buffers(self, names: Sequence[str]) -> dict[str, tuple[Share, Tensor]]:
        """Return the named buffers that this device uses, with its share of each."""
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

    def save(self, folder: str) -> None:
        """Begin to write this device's part of a checkpoint."""
        self.saver.save(folder)

    def load(self, folder: str) -> None:
        """Begin to read this device's part of a checkpoint."""
        self.saver.load(folder)

    def adopt(self, wanted: bool) -> None:
        """Go on with the state that was read, if it is wanted."""
        self.saver.adopt(wanted)

    def poll(self, wait: float) -> Done | None:
        """Wait up to `wait` seconds for a save or load. Return its outcome. None: it is still running."""
        return self.saver.poll(wait)

    def protect(self, _: object = None) -> None:
        """Copy the state into memory that outlives this process."""
        assert self.versions is not None
        self.versions.write()

    def restore(self, step: int) -> None:
        """Take the state after a step from memory."""
        assert self.versions is not None
        self.versions.restore(step)

    def between(self, call: Call) -> None:
        """Do what is due after a call was answered, while the driver makes the next one."""
        if self.versions is None or self.versions.holders.state is not None:
            return  # there is no memory for it, or instructions copy the state
        if call == "step" and self.trouble is None and not self.failed:
            try:
                self.protect()
            except Exception as error:  # noqa: BLE001  it is the answer to the next call
                self.trouble = failure_of(self.device, error)

    def answer(self, call: Call, argument: object) -> object:
        """Answer a call. A failure is an answer too."""
        if self.trouble is not None:
            return self.trouble
        try:
            found: object = getattr(self, call)(argument)
        except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
            found = failure_of(self.device, error)
        self.failed = isinstance(found, Failure)  # a step that ends half-way leaves no state to keep
        return found

    def close(self) -> None:
        """End this worker's threads, where its process continues."""
        self.thread.shutdown()
        self.worker.close()


def main(descriptors: Sequence[int]) -> int:
    """Be a worker of this machine: receive an assignment, then answer calls until the driver is gone."""
    end, marks, values = descriptors
    termination = Termination()
    termination.install()
    work(Channel(socket.socket(fileno=end), codec=CODEC), marks, values, termination)
    return 0


def work(channel: Channel, marks: int, values: int, termination: Termination) -> None:
    """Answer the calls of a driver until it is gone; `values`: the file of the initial values."""
    with suppress(ClosedError):
        given = cast(Assignment, channel.recv())
        sys.path[:] = given.path or sys.path
        serve(
            channel,
            given,
            lambda: WorkerServer(given, SharedValues(values, given.values), map_marks(marks)),
            termination,
        )


def serve(
    channel: Channel, given: Assignment, build: Callable[[], WorkerServer], termination: Termination
) -> None:
    """Build a worker, report that it is ready or why it is not, and answer calls until the driver is gone."""
    try:
        server = build()
    except Exception as error:  # noqa: BLE001  it is sent to the driver, which raises
        channel.send(failure_of(given.device, error))
        return
    channel.send(None)
    try:
        while True:
            call, argument = cast("tuple[Call, object]", channel.recv())
            answer = server.answer(call, argument)
            if termination.news():
                channel.send(Heartbeat(leaving=True))
            channel.send(answer)
            server.between(call)
    except ClosedError:
        return


def crowded(workers: int) -> bool:
    """Return whether workers of this machine have to share its accelerators."""
    return workers > torch.cuda.device_count()


def take_one(local: int) -> None:
    """Let this process see one accelerator only, as the first: the one that captured code names.

    It must not have looked for accelerators yet. Only those that are visible to it are counted.
    """
    given = os.environ.get(VISIBLE)
    there = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    os.environ[VISIBLE] = there[local % len(there)]
