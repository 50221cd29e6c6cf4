"""Sessions that go on with fewer devices when one is lost for good, and with more when they are back.

A device is lost for good when its process is lost and no retry is left, or when it is lost a second time at
the same instruction of the same step. Exceptions are no loss of a device: they would come on others too.
A machine that has no replacement is lost with its devices. After `REFILL` good steps all devices are tried
again, on several machines as many as there is room for.

The state, or its newest version where workers are lost, is written as a checkpoint into memory, or beside the
run's checkpoints if there are several machines, and the workers of the other layout load it: what reads
checkpoints reads any layout.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import Any

from piper.checkpoint.folder import step_path, whole
from piper.errors import ConfigError, LaunchError, ScheduleError, WorkerError
from piper.ir.format import count
from piper.run.driver_checkpoints import copy_moved, write_version
from piper.run.recovery import REFILL, Recovery
from piper.run.run_events import Event, Phases, Stragglers, failure_event
from piper.runtime.setup import ProgramLike
from piper.workers.processes import MEMORY, folder_for_now, remove_left
from piper.workers.results import Batch, StepResult

MOVED = "piper-resize-"  # begins the names of folders in which a state moves


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRange:
    """How many devices an elastic job may have, and its program for each number."""

    fewest: int
    most: int
    program: Callable[[int], ProgramLike]  # raises an error if the strategy has none for so many devices


class ElasticRecovery(Recovery):
    """Sessions whose number of devices can change between steps."""

    elastic = True
    shrunk = False  # a device was lost; all of them are tried again later
    fewer: tuple[Sequence[int], str] | None = None  # accelerators to go on with when workers start, and why

    def __init__(self, *given: Any, sizes: ElasticRange, **more: Any) -> None:  # noqa: ANN401  as its base has them
        """Prepare the first session, which has all devices."""
        super().__init__(*given, **more)
        self.sizes = sizes
        self.places: Sequence[int] = range(sizes.most)  # the accelerators of its devices
        self.states: dict[Path, ExitStack] = {}  # that move, and what removes them
        if self.disk is not None:
            for left in self.disk.folder.glob(f"{MOVED}*"):  # by a run that was killed
                rmtree(left, ignore_errors=True)  # the process that removes it may be faster

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch. Try all devices first, if it is time to."""
        if self.shrunk and self.good and self.good % REFILL == 0:
            room = self.starter.room(warm=True)
            size = self.sizes.most if room is None else self._largest(room)
            if size is not None and size > len(self.places):
                self.resize(size)
                self.left = self.good = 0  # a device that fails soon has not come back
        result = super().step(batch)
        self._drop(None)  # there is a version in the new layout now
        return result

    def resize(self, devices: int) -> None:
        """Go on with so many devices, with the same state and global batch. Call it between steps."""
        if devices == len(self.places):
            return
        if not self.sizes.fewest <= devices <= self.sizes.most:
            raise ConfigError(
                f"the run cannot go on with {devices} devices",
                by="resize",
                facts={"elastic": f"{self.sizes.fewest} to {self.sizes.most} devices"},
                hint="choose a number in this range, or widen it: piper.Job(elastic=...)",
            )
        where = self._where()
        if where is None:
            what = "the number of devices cannot change on several machines without checkpoints"
            hint = "give the job a folder that all machines see: piper.Job(checkpoint=...)"
            raise ConfigError(what, by="resize", hint=hint)
        program, before = self.sizes.program(devices), len(self.places)
        try:
            self.settle()
        except ConfigError as error:
            self.unsaved = error  # of a checkpoint, which this change does not need
        with self._folder(where) as state:
            self.call(lambda: self.session.write(state, None, wait=True, keep=None))
            self._end()
            self.failed_at, self.phases = monotonic(), Phases()
            self._move(state, self.done, program, range(devices))
        self._resized(self.done, before, "lost ones are tried" if self.shrunk else "as asked")
        self.shrunk = devices < self.sizes.most and self.shrunk
        self.call(self._protect)

    def _where(self) -> Path | None:
        """Return the folder in which the state can move: all workers see it. None: there is none."""
        if not self.starter.near:
            return None if self.disk is None else self.disk.folder
        return MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())

    @contextmanager
    def _folder(self, where: Path) -> Iterator[Path]:
        """Yield the path for a state that moves, and remove it if the run does not go on from it."""
        remove_left(MOVED, where)
        hold = ExitStack()
        state = hold.enter_context(folder_for_now(f"{MOVED}{os.getpid()}-", where)) / "state"
        self.states[state] = hold
        try:
            yield state
        finally:
            self._drop(None if self.moved is None else self.moved[0])

    def _move(self, state: Path, step: int, program: ProgramLike, places: Sequence[int]) -> None:
        """Take another program from a state after a step on. No worker may run."""
        self.moved = (state, step)
        self._drop(state)
        self._switch(program, places)

    def _switch(self, program: ProgramLike, places: Sequence[int]) -> None:
        """Take another program, and memory for its versions. No worker may run.

        Where there is too little memory, the run can go on as it was, from the state that has moved.
        """
        self.versions.empty()  # what it takes is free for the next
        versions = self.versions.of(program.plans)
        self.versions.close()
        self.versions = versions
        self.protected, self.good = False, 0
        self.starter.use(program, versions, places)
        self.program, self.places, self.stragglers = program, places, Stragglers(program.plans)
        self.results.clear()  # sums in another order have other bits

    def _fail(self, error: WorkerError | LaunchError) -> None:
        """End all workers. Go on without the device that is lost for good, or raise the error."""
        try:
            super()._fail(error)
        except (WorkerError, LaunchError):
            device = error.device if isinstance(error, WorkerError) else len(self.places) - 1
            raised = isinstance(error, WorkerError) and error.kind == "error"
            size = self._largest(len(self.places) - 1)
            if raised or device is None or size is None or not self._has_state():
                raise
            self.left, self.last = self.retries, None
            self.notify(failure_event(error, self.at, self.left))
            left = [place for n, place in enumerate(self.places) if n != device]
            self.fewer = left[:size], f"device {device} is lost"

    def _start(self) -> None:
        """Start all workers, as many as there is room for if machines are lost."""
        if self.fewer is not None:
            self._go_on_with(*self.fewer)
        room = None if self.failed_at is None else self.starter.room()
        while room is not None and room < len(self.places):
            size = self._largest(room)
            if size is None or not self._has_state():
                break
            self._go_on_with(self.places[:size], f"there is room for {room}")
            room = self.starter.room()  # each of fewer devices needs more memory
        super()._start()

    def _has_state(self) -> bool:
        """Return whether there is a state that workers of another layout can take."""
        moved = self.moved is not None and self._has_batches(self.moved[1])
        movable = self._movable() is not None and self._where() is not None
        return moved or movable or bool(self._past())

    def _movable(self) -> int | None:
        """Return the step of the newest version that another layout can take. None: there is none."""
        version = self.versions.newest(self.done)
        can = version is not None and self._has_batches(version) and self.versions.whole
        return version if can else None

    def _go_on_with(self, places: Sequence[int], why: str) -> None:
        """Take fewer devices and the newest state there is, in memory or on a disk. No worker may run."""
        before, version, program = len(self.places), self._movable(), self.sizes.program(len(places))
        if version is not None and (where := self._where()) is not None:
            with self._folder(where) as state:
                write_version(self.program, self.versions, version, state, unread=self.unread, data=None)
                self._move(state, version, program, places)
        else:  # what has moved already stays, else it comes from the disk
            self._switch(program, places)
        self.shrunk, self.fewer = True, None
        self._resized(self.at, before, why)

    def _resized(self, step: int, before: int, why: str) -> None:
        what = f"going on with {count(len(self.places), 'device')} instead of {before}: {why}"
        self.notify(Event(event="resize", step=step, what=what))

    def _largest(self, most: int) -> int | None:
        """Return the largest number of devices up to `most` that the strategy has a program for."""
        for size in range(min(most, self.sizes.most), self.sizes.fewest - 1, -1):
            try:
                self.sizes.program(size)
            except (ConfigError, ScheduleError):
                continue  # a number of devices by which the batch does not divide, for example
            return size
        return None

    def _drop(self, needed: Path | None) -> None:
        """Give back the memory of states that have moved, but for the one that is needed."""
        self.moved = None if needed is None else self.moved
        for state in self.states.keys() - {needed}:
            self.states.pop(state).close()

    def flush(self, folder: Path, data: Callable[[], object]) -> int | None:
        """End all workers, and write the newest state as a checkpoint. Return its step.

        A state that has just moved has no version yet. If it moved before all callbacks of its step had run,
        the checkpoint has them as they are.
        """
        flushed = super().flush(folder, data) if self.versions.descriptors else None
        if flushed is not None or self.moved is None:
            return flushed
        state, step = self.moved
        if not whole(path := step_path(folder, step)):
            then = self.completed[step] if step in self.completed else data()
            copy_moved(state, path, data=then, options=self.set_after.get(step, ()))
        return step

    def close(self) -> None:
        """End every worker. Idempotent."""
        super().close()
        self._drop(None)
