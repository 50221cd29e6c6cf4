"""A worker's side of a launch: one device, which does what it is called for and says what went wrong."""

import queue
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import piper.experts  # noqa: F401  captured code calls its operators
from piper.launchers.accelerator import comms_of, ending, take_one
from piper.launchers.freight import unpack_setup
from piper.launchers.messages import CODEC, PATIENCE, Assignment, Call, SharedState
from piper.launchers.persist import Done, Keeper
from piper.launchers.restoring import blank_values
from piper.launchers.transport.channel import Channel, ClosedError
from piper.launchers.transport.shared_memory import ProgressMarks, SharedValues
from piper.launchers.watch import Failure, Watcher, failure_of
from piper.plan.divided import Share
from piper.runtime.env import Rows
from piper.runtime.record import Recording
from piper.runtime.setup import Initial
from piper.runtime.trail import Mark
from piper.runtime.worker import Sums, Worker


class WorkerServer:
    """A worker that answers calls. Its first failure is its answer, though other streams may still wait."""

    def __init__(self, order: Assignment, initial: Initial, cells: memoryview) -> None:
        self.device = order.device
        torch.set_num_threads(order.options.threads)
        setup = unpack_setup(order.setup)
        if setup.device.type == "cuda":
            take_one(order.local)
        self.answers: queue.SimpleQueue[Sums | Failure] = queue.SimpleQueue()
        self.watcher = Watcher(self.device, cells, self.answers.put)
        meeting, wait = order.meeting, timedelta(seconds=max(order.options.timeout, PATIENCE))
        self.store = TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=wait
        )
        comms = comms_of(
            setup.plans,
            self.device,
            setup.device,
            self.store,
            meeting.address,
            order.options.timeout,
            patience=wait,
            shares=order.shares,
        )
        if order.options.blank:
            initial = blank_values(setup.outline)
        self.worker = Worker(
            setup,
            self.device,
            comms,
            initial,
            order.options,
            on_failure=ending(comms),
            watch=self.watcher.watch,
        )
        self.keeper = Keeper(self.worker)
        self.thread = ThreadPoolExecutor(1, "step")

    def step(self, batch: Mapping[str, Rows]) -> Sums | Failure:
        """Train on this device's rows of a batch."""
        self.thread.submit(self._step, batch)
        return self.answers.get()

    def _step(self, batch: Mapping[str, Rows]) -> None:
        try:
            self.answers.put(self.worker.step(batch))
        except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
            self.watcher.fail(error)

    def owned(self, buckets: Sequence[str]) -> dict[str, Tensor]:
        """What this device holds of some buckets."""
        return {name: self.worker.owned(name) for name in buckets}

    def gradients(self, buckets: Sequence[str]) -> dict[str, Tensor | None]:
        """The last step's gradients of what this device holds of some buckets."""
        return {name: self.worker.gradient(name) for name in buckets}

    def reached(self, _: object) -> set[str]:
        """The parameters that have gradients."""
        return self.worker.env.state.reached

    def buffers(self, names: Sequence[str]) -> dict[str, tuple[Share, Tensor]]:
        """The buffers that this device uses, of those asked for, and which share of each it has."""
        return self.worker.buffers(names)

    def trail(self, _: object) -> dict[Mark, Tensor]:
        """What every chunk returned in the last step."""
        return {} if self.worker.trail is None else self.worker.trail.kept

    def record(self, _: object) -> Recording | None:
        """When the instructions of the recorded steps ran, on this worker's clock."""
        return None if self.worker.recorder is None else self.worker.recorder.take()

    def clock(self, _: object) -> float:
        """What time it is here."""
        return monotonic()

    def save(self, folder: str) -> None:
        """Begin to write this device's part of a checkpoint."""
        self.keeper.save(folder)

    def load(self, folder: str) -> None:
        """Begin to read this device's part of a checkpoint."""
        self.keeper.load(folder)

    def poll(self, wait: float) -> Done | None:
        """What became of it, if it has ended within so many seconds."""
        return self.keeper.poll(wait)

    def answer(self, call: Call, argument: object) -> object:
        """Do what is asked for; a failure is an answer too."""
        try:
            return getattr(self, call)(argument)
        except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
            return failure_of(self.device, error)

    def close(self) -> None:
        """End this worker's threads, where its process goes on without it."""
        self.thread.shutdown()
        self.worker.close()


def main(descriptors: Sequence[int]) -> int:
    """Be a worker of this machine: begin with an order, answer calls until the driver is gone."""
    end, marks, values = descriptors
    channel = Channel(socket.socket(fileno=end), codec=CODEC)
    try:
        places, order = cast("tuple[SharedState, Assignment]", channel.recv())
        sys.path[:] = places.path
        cells = ProgressMarks(marks, places.devices, places.width).of(order.device)
        try:
            member = WorkerServer(order, SharedValues(values, places.values), cells)
        except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
            channel.send(failure_of(order.device, error))
            return 1
        channel.send(None)
        serve(member, channel)
    except ClosedError:
        pass
    return 0


def serve(member: WorkerServer, channel: Channel) -> None:
    """Answer calls until the driver is gone."""
    try:
        while True:
            call, argument = cast("tuple[Call, object]", channel.recv())
            channel.send(member.answer(call, argument))
    except ClosedError:
        return
