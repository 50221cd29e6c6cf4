"""`inline`: every device is a thread of this process."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from piper.runtime.accelerator import computing_on, is_accelerator
from piper.runtime.comm.base import speaks_in
from piper.runtime.comm.inline import World
from piper.runtime.context import Dice
from piper.runtime.setup import ProgramLike, Setup, blank_values, initial_tensors, setup_of
from piper.runtime.worker import Options, Worker
from piper.workers.blame import Watcher, blame, private_marks
from piper.workers.group import A, R, Starter, WorkerGroup, unread_values
from piper.workers.processes import ProcessStatus, running
from piper.workers.serve import WorkerAnswers, needs_of
from piper.workers.transport.versions import Files, WorkerVersions


class InlineWorkerGroup(WorkerGroup):
    """Workers that are threads of this process."""

    in_order = True

    def __init__(self, program: ProgramLike, options: Options, versions: Files | None = None) -> None:
        super().__init__(program, options)
        self.versions: Files | None = versions
        self.world = World(program.plans, options.timeout)
        self.worlds = [(program.plans, self.world)]  # and those of programs that have other communicators
        self.watchers = {
            device: Watcher(device, private_marks(), self.failures.append) for device in self.devices
        }
        self.workers: dict[int, Worker] = {}
        self.answers: dict[int, WorkerAnswers] = {}
        self.threads = ThreadPoolExecutor(len(self.devices), "device")
        self.computing = ExitStack()  # on as many threads as the options say, until it is closed

    def start(self) -> dict[str, Tensor]:
        self.computing.enter_context(computing_on(self.options.threads))
        program, options, setup = self.program, self.options, setup_of(self.program)
        if is_accelerator(setup.device) and len(self.devices) > 1:
            # They share one accelerator: on one stream, what a device hands another is in order by itself.
            options = replace(options, streams=False)
        values = setup.build_code(setup.plans, lambda: {} if options.blank else initial_tensors(program))
        initial = blank_values(setup.outline) if options.blank else values.__getitem__
        dice = Dice(setup.device)
        for device, watcher in self.watchers.items():
            comms = self.world.member(device)
            worker = Worker(setup, device, comms, initial, options, dice, watcher.watch, watcher.show)
            versions = None if self.versions is None else WorkerVersions(worker, self.versions)
            self.workers[device], self.answers[device] = worker, WorkerAnswers(worker, versions)
        return unread_values(program, values)

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        if not needs_of(call).together:
            return {device: call(self.answers[device], value) for device, value in arguments.items()}
        # Every device answers in its thread. An error of any is one that names the cause.
        futures = {d: self.threads.submit(call, self.answers[d], value) for d, value in arguments.items()}
        wait(futures.values())
        for device, future in futures.items():
            if isinstance(error := future.exception(), Exception):
                self.watchers[device].fail(error)
        if self.failures:
            cause = next(w.first for w in self.watchers.values() if w.first is not None)
            statuses = {
                device: ProcessStatus(process=os.getpid(), running=running(watcher.marks))
                for device, watcher in self.watchers.items()
            }
            raise blame(self.snapshot(statuses, self.options.timeout)) from cause
        return {device: future.result() for device, future in futures.items()}

    def prepare(self, number: int, setup: Setup, buffers: Mapping[str, Tensor], *, trains: bool) -> None:
        known = next((world for plans, world in self.worlds if speaks_in(setup.plans, plans)), None)
        world = known or World(setup.plans, self.options.timeout)
        if known is None:
            self.worlds.append((setup.plans, world))
        for device, worker in self.workers.items():
            worker.prepare(number, setup, world.member(device), buffers.__getitem__, trains=trains)

    def close(self) -> None:
        self.computing.close()
        for _, world in self.worlds:
            world.stop()
        self.threads.shutdown()
        for worker in self.workers.values():
            worker.close()


class InlineStarter(Starter):
    """Starts workers as threads. What hangs in a thread cannot be ended."""

    files: Files | None = None  # the memory of versions, where others hold it

    def start(self, options: Options) -> InlineWorkerGroup:
        files = self.files if self.versions is None else self.versions.files
        group = InlineWorkerGroup(self.program, options, files)
        group.begin()
        return group
