"""`inline`: every device is a thread of this process."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from piper.checkpoint.load import blank_values
from piper.errors import WorkerError
from piper.launchers.base import ended, streams_of
from piper.launchers.checkpointing import Checkpoints
from piper.launchers.failures import Failure, JobSnapshot, Watcher, blame, private_marks
from piper.launchers.messages import Call
from piper.launchers.processes import ProcessStatus, SharedFile, running
from piper.launchers.run_programs import Prepared, ProgramRun
from piper.launchers.transport.version_sections import VersionReader
from piper.launchers.transport.versions import WorkerVersions
from piper.launchers.worker_answers import WorkerAnswers
from piper.runtime.comm.base import speaks_in
from piper.runtime.comm.inline import World
from piper.runtime.context import Dice
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile
from piper.runtime.setup import Initial, ProgramLike, initial_values, setup_of
from piper.runtime.worker import Options, Sums, Worker


class InlineRun(ProgramRun):
    """A job whose devices are threads."""

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        versions: Mapping[int, tuple[SharedFile, ...]] | None = None,
    ) -> None:
        super().__init__(program, options)
        self.world = World(program.plans, options.timeout)
        self.worlds = [self.world]  # and those of programs that have other communicators
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(options.threads)  # every thread that begins to compute from now on has as many
        setup = setup_of(program)
        dice = Dice(setup.device)
        if setup.device.type == "cuda" and len(self.plans.devices) > 1:
            # They share one accelerator: on one stream, what a device hands another is in order by itself.
            options = replace(options, streams=False)
        initial = setup.build_code(
            setup.plans,
            lambda: blank_values(setup.outline) if options.blank else initial_values(program),
        )
        self.failures: list[Failure] = []
        self.watchers = {
            device: Watcher(device, private_marks(streams_of(self.plans)), self.failures.append)
            for device in program.plans.devices
        }
        self.workers = {
            device: Worker(
                setup,
                device,
                self.world.member(device),
                initial,
                options,
                dice,
                self.world.stop,
                watcher.watch,
            )
            for device, watcher in self.watchers.items()
        }
        self.unread = self._unread(initial)
        self.busy: dict[int, float] = {}  # threads share cores: one cannot be distinguished from the others
        self.threads = ThreadPoolExecutor(len(self.workers), "device")
        self.open = True
        self.answers = {device: WorkerAnswers(worker) for device, worker in self.workers.items()}
        self.versions = {
            device: WorkerVersions(worker, versions)
            for device, worker in self.workers.items()
            if versions is not None
        }
        self.checkpoints = Checkpoints(program, self.workers, self._ask, self.unread, self.close)

    def _unread(self, initial: Initial) -> dict[str, Tensor]:
        """Return the values that no chunk reads and so no worker holds. They never change."""
        outline = self.program.outline
        held = {piece.name for bucket in self.plans.buckets.values() for piece in bucket.pieces}
        held |= {name for chunk in outline.chunks for name in chunk.buffers}
        names = (*(p.name for p in outline.parameters), *(b.name for b in outline.buffers if b.persistent))
        return {name: initial(name) for name in names if name not in held}

    def _step(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        if not self.open:
            raise ended()
        sums = self._together(ready.program, lambda worker: worker.step(batch, ready.number))
        self.checkpoints.poll()
        if self.plans.protection is None:
            self.protect()
        return sums

    def _together(self, program: ProgramLike, act: Callable[[Worker], Sums]) -> Sums:
        """Let every device run its plan of a program, and return the sums, which are the same on all."""
        futures = {device: self.threads.submit(act, worker) for device, worker in self.workers.items()}
        wait(futures.values())
        for device, future in futures.items():
            if isinstance(error := future.exception(), Exception):
                self.watchers[device].fail(error)
        self._end_if_failed(program)
        return next(iter(futures.values())).result()

    def protect(self) -> None:
        """Copy the state into memory that outlives workers, where it is kept."""
        for device, versions in self.versions.items():
            try:
                versions.write()
            except Exception as error:  # noqa: BLE001  it is raised below, as a failure of its device
                self.watchers[device].fail(error)
        self._end_if_failed(self.program)

    def _end_if_failed(self, program: ProgramLike) -> None:
        if self.failures:
            self.close()
            cause = next(w.first for w in self.watchers.values() if w.first is not None)
            raise self._blame(program) from cause

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        """Take the state after a step from memory; `unread`: the values that no device holds."""
        reader: VersionReader | None = None  # threads read the same memory
        for versions in self.versions.values():
            reader = reader or versions.reader(step)
            versions.restore(step, reader)
        self.unread.update(unread)

    def _prepare(self, made: Prepared, *, trains: bool) -> None:
        setup, world = setup_of(made.program), self.world
        if not speaks_in(setup.plans, self.plans):
            world = World(setup.plans, self.options.timeout)
            self.worlds.append(world)
        for device, worker in self.workers.items():
            initial = made.buffers.__getitem__
            worker.prepare(made.number, setup, world.member(device), initial, world.stop, trains=trains)

    def _forward(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        if not self.open:
            raise ended()
        return self._together(ready.program, lambda worker: worker.evaluate(ready.number, batch))

    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        if not self.open:
            raise ended()
        return {device: getattr(self.answers[device], call)(value) for device, value in arguments.items()}

    def _blame(self, program: ProgramLike) -> WorkerError:
        """Return the error that names the cause."""
        statuses = {
            device: ProcessStatus(process=os.getpid(), running=running(watcher.marks))
            for device, watcher in self.watchers.items()
        }
        snapshot = JobSnapshot(
            plans=program.plans,
            origins=program.origins,
            timeout=self.options.timeout,
            statuses=statuses,
            failures=self.failures,
        )
        return blame(snapshot)

    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
        same = ClockOffset(offset=0.0, error=0.0)
        return {d: (w.recorder.take(), same) for d, w in self.workers.items() if w.recorder is not None}

    def close(self) -> None:
        """End every thread. Idempotent."""
        try:
            if self.open:
                torch.set_num_threads(self.threads_before)
                self.checkpoints.settle()
        finally:
            self.open = False
            for world in self.worlds:
                world.stop()
            self.threads.shutdown()
            for worker in self.workers.values():
                worker.close()


@contextmanager
def launch_inline(program: ProgramLike, options: Options | None = None) -> Iterator[InlineRun]:
    """Start a program on threads of this process, and end them with the block."""
    run = InlineRun(program, options or Options())
    try:
        yield run
    finally:
        run.close()
