"""A run whose workers may be lost. Every failure takes one path, and costs no step, no sample and no bit.

All workers are ended and started again, from a process that has torch imported and from the program as it
was compiled and proven. They take the newest complete version of the state from memory, see [Note: versions],
and repeat the steps since then, at most two, on the batches that are still held. A step is a function of the
state, the batch and the step's number, so it gives the same bits again. That is compared.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Literal, TypeVar

from torch import Tensor

from piper.checkpoint.folder import step_path, whole
from piper.errors import LaunchError, PiperError, WorkerError
from piper.launchers.base import Resumed, StepResult, Trains
from piper.launchers.events import Event, Notify, failure, mismatch
from piper.launchers.flushing import write_version
from piper.launchers.starters import InlineStarter, LocalStarter, Recoverable, Starter
from piper.launchers.stragglers import Stragglers
from piper.launchers.versions import Versions
from piper.runtime.record import Clock, Recording
from piper.runtime.setup import ProgramLike
from piper.runtime.trail import Mark
from piper.runtime.worker import Options

T = TypeVar("T")
REFILL = 100  # good steps after which all retries are there again
KEPT = 3  # batches and results that are held: those of steps that may be repeated, and of the next
STEPS = 5  # steps whose times are known before a stall is judged by them
SLOWER = 10.0  # times the median step that any one wait may take
LEAST = 6.0  # seconds that any one wait may take, however short steps are


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save that may not be complete."""

    step: int
    path: Path
    data: object
    keep: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failure as it can come a second time."""

    step: int
    device: int | None
    what: str
    place: int | None


class RecoveringRun(Trains):
    """A run that goes on when workers are lost, as long as there are retries."""

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        starter: Starter,
        versions: Versions,
        *,
        retries: int,
        stall: float | None = None,
        notify: Notify = lambda event: None,
    ) -> None:
        """Prepare a run; `stall`: seconds. None: as steps turn out to take."""
        self.program, self.options, self.starter, self.versions = program, options, starter, versions
        self.retries = self.left = retries
        self.given_stall, self.notify = stall, notify
        self.run: Recoverable | None = None
        self.begun: tuple[Path | str | None, int] = (None, 0)  # the checkpoint that it began from, its step
        self.unread: dict[str, Tensor] = {}
        self.protected = False  # the state that it began with is in memory
        self.done = self.at = 0  # steps: complete, and under way
        self.held: dict[int, Mapping[str, Tensor]] = {}
        self.results: dict[int, StepResult] = {}
        self.saving: Saving | None = None
        self.last: Failed | None = None
        self.failed_at: float | None = None  # since when no worker runs
        self.phases: dict[str, float] = {}
        self.good = 0
        self.times: deque[float] = deque(maxlen=50)
        self.stragglers = Stragglers(program.plans)

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""
        self.held[self.done + 1] = batch

        def act(run: Recoverable) -> StepResult:
            self._protect(run)
            began = monotonic()
            result = run.step(batch)
            self.times.append(monotonic() - began)
            return result

        result = self._call(act, self.done + 1)
        self.done += 1
        self.results[self.done] = result
        for held in (self.held, self.results):
            held.pop(self.done - KEPT, None)
        self._passed()
        return result

    def _passed(self) -> None:
        """Note a good step."""
        self.last = None
        self.good += 1
        if self.good >= REFILL:
            self.left = self.retries
        if self.run is not None:
            self.starter.expect(self.run, self.stall)
            for event in self.stragglers.note(self.done, self.run.busy):
                self.notify(event)

    @property
    def stall(self) -> float:
        """Return the seconds without progress after which the job has stalled."""
        if self.given_stall is not None:
            return self.given_stall
        if len(self.times) < STEPS:
            return self.options.timeout
        return min(self.options.timeout, max(LEAST, SLOWER * median(self.times)))

    def _call(self, act: Callable[[Recoverable], T], step: int | None = None) -> T:
        """Return what a method of the run returns, over as many failures as there are retries.

        step: the one that is under way. None: it is called between steps.
        """
        while True:
            self.at = self.done if step is None else step
            try:
                return act(self._running())
            except WorkerError as error:
                self._failed(error)
            except LaunchError as error:
                if self.failed_at is None:
                    raise  # it never ran
                self._failed(error)

    def _running(self) -> Recoverable:
        """Return the run. Start its workers if they do not run."""
        if self.run is None:
            self._start()
        assert self.run is not None
        return self.run

    def _start(self) -> None:
        """Start all workers, let them take the newest state there is, and repeat the steps since then."""
        version = self.versions.newest()
        path, first = self.begun
        fresh = version is None and self.done == first
        if not fresh and (version is None or not self._held(version)):
            raise no_version(self.done)
        with self._phase("start"):
            self.run = self.starter.start(self.options if fresh else replace(self.options, blank=True))
        self.starter.expect(self.run, self.given_stall or self.options.timeout)
        with self._phase("load"):
            if version is None:
                if path is not None:
                    self.run.load(path)
                self.unread, version = dict(self.run.unread), first
            else:
                self.versions.forget(lambda step: step > version)  # half of one may be there
                self.run.restore(version, self.unread)
                self.protected = True
        with self._phase("replay"):
            self._replay(self.run, version)
        if self.failed_at is not None:
            self._recovered(version)

    def _held(self, version: int) -> bool:
        """Return whether the batches of the steps after a version are all held."""
        return all(step in self.held for step in range(version + 1, self.done + 1))

    def _replay(self, run: Recoverable, version: int) -> None:
        """Repeat the steps after a version, and the save that was under way."""
        under_way = self.at  # steps that are repeated are named by their own numbers
        for step in range(version, self.done + 1):
            if step > version:
                self.at = step
                again, before = run.step(self.held[step]), self.results[step]
                if again != before:
                    self.notify(mismatch(step, before, again))
            saving = self.saving
            if saving is not None and saving.step == step and not whole(saving.path):
                run.save(saving.path, data=saving.data, wait=False, keep=saving.keep)
        self.at = under_way

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + monotonic() - began

    def _failed(self, error: WorkerError | LaunchError) -> None:
        """End all workers. Raise the error if it is not to be tried again."""
        if self.failed_at is None:
            self.failed_at, self.phases = monotonic(), {}
        self.good = 0
        with self._phase("end"):
            self._end()
        now = failed(error, self.at)
        if self.left < 1 or (now is not None and now == self.last):
            raise error
        self.last = now
        self.left -= 1
        self.notify(failure(error, self.at, self.left))

    def _end(self) -> None:
        if self.run is not None:
            with suppress(PiperError):  # a save that was under way: the failure is what matters
                self.run.close()
            self.run = None

    def _recovered(self, version: int) -> None:
        assert self.failed_at is not None
        phases = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        seconds = round(monotonic() - self.failed_at, 3)
        self.failed_at = None
        self.notify(
            Event(
                event="recovery",
                step=self.at,
                version=version,
                source="memory",
                replayed=self.done - version,
                seconds=seconds,
                phases=phases,
                left=self.left,
            )
        )

    def _protect(self, run: Recoverable) -> None:
        """Copy the state that the run begins with."""
        if not self.protected:
            run.protect()
            self.protected = True

    def begin(self) -> None:
        """Start all workers."""
        self._call(lambda run: None)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint."""
        self.saving = None if wait else Saving(step=self.done, path=Path(path), data=data, keep=keep)
        self._call(lambda run: run.save(path, data=data, wait=wait, keep=keep))

    def load(self, path: Path | str) -> Resumed:
        """Go on from a checkpoint."""
        found = self._call(lambda run: run.load(path))
        self.versions.forget(lambda step: True)
        assert self.run is not None
        self.unread, self.protected = dict(self.run.unread), False
        self.begun, self.done = (path, found.step), found.step
        self.held.clear()
        self.results.clear()
        return found

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        self._call(lambda run: run.settle())
        self.saving = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer in full, by fully qualified name."""
        return self._call(lambda run: run.state_dict())

    def gradients(self) -> dict[str, Tensor]:
        """Return the last step's gradients in full, before clipping; `keep_gradients` must be on."""
        return self._call(lambda run: run.gradients())

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """Return what every chunk returned in the last step, by device; `keep_outputs` must be on."""
        return self._call(lambda run: run.trails())

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """Return when the instructions of the recorded steps ran, by device; `profile` must be on."""
        return self._call(lambda run: run.recordings())

    def flush(self, folder: Path, positions: Mapping[int, object]) -> int | None:
        """End all workers, and write the newest state in memory as a checkpoint. Return its step.

        For a step that takes longer than there is time. positions: the state of the data after each step.
        None: there is no version in memory.
        """
        self._end()
        step = self.versions.newest()
        if step is not None and not whole(path := step_path(folder, step)):
            data = positions.get(step)
            write_version(self.program, self.versions, step, path, unread=self.unread, data=data)
        return step

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return self.run is not None and self.run.leaving()

    def close(self) -> None:
        """End every worker. Idempotent."""
        if self.run is not None:
            run, self.run = self.run, None
            run.close()


def failed(error: WorkerError | LaunchError, step: int) -> Failed | None:
    """Return a failure in a form that can be compared. None: a second one would not be the same.

    A process that was killed or stopped at no instruction, because it had just started for example, was not
    killed by what it did.
    """
    if not isinstance(error, WorkerError) or (error.place is None and error.kind != "error"):
        return None
    return Failed(step=step, device=error.device, what=error.what, place=error.place)


def no_version(step: int) -> WorkerError:
    """Return the error of a run whose state is lost."""
    return WorkerError(
        "no version of the state is complete in memory",
        by=f"recovery, after step {step}",
        hint="--resume goes on from the newest checkpoint",
    )


@contextmanager
def recovering(
    program: ProgramLike,
    on: Literal["inline", "local"],
    options: Options,
    *,
    retries: int,
    stall: float | None = None,
    notify: Notify = lambda event: None,
) -> Iterator[RecoveringRun]:
    """Start a program on workers that are replaced when they are lost, and end them with the block."""
    versions = Versions(program.plans)
    starter: Starter = InlineStarter(program, versions) if on == "inline" else LocalStarter(program, versions)
    run = RecoveringRun(program, options, starter, versions, retries=retries, stall=stall, notify=notify)
    try:
        run.begin()
        yield run
    finally:
        try:
            run.close()
        finally:
            starter.close()
            versions.close()
