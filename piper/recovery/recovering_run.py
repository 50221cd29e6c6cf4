"""A run whose workers may be lost. Every failure takes one path, and costs no step, no sample and no bit.

All workers are ended and started again, from a process that has torch imported and from the program as it
was compiled and proven. They take the newest complete version of the state from memory, see [Note: versions],
and repeat the steps since then, at most two, on the batches that are still held. A step is a function of the
state, the batch and the step's number, so it gives the same bits again. That is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor

from piper.checkpoint.folder import discard, step_path, whole
from piper.checkpoint.target import UnwrittenError
from piper.errors import ConfigError, LaunchError, PiperError, WorkerError
from piper.launchers.base import Resumed, StepResult
from piper.launchers.callback_states import states_of, with_states
from piper.launchers.transport.versions import Versions
from piper.plan.protected import GENERATIONS
from piper.recovery.flushing import write_version
from piper.recovery.retried_calls import RetriedCalls
from piper.recovery.retrying import (
    Disk,
    Failed,
    Phases,
    Saving,
    StepTimes,
    failed,
    first_intact,
    lost_save,
    no_version,
)
from piper.recovery.run_events import Notify, failure, mismatch, recovery, skipped, warm
from piper.recovery.starters import Recoverable, Starter, starter_of, versions_of
from piper.recovery.stragglers import Stragglers
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

T = TypeVar("T")
REFILL = 100  # good steps after which all retries are there again
KEPT = 3  # batches that are held: those of steps that may be repeated, and of the next
RESULTS = 10_000  # results that are held, to compare repeated steps with


class RecoveringRun(RetriedCalls):
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
        disk: Disk | None = None,
    ) -> None:
        """Prepare a run.

        stall: seconds without progress that are a failure. None: as steps turn out to take.
        disk: the checkpoints to go on from where memory is lost. None: there are none.
        """
        self.disk, self.source = disk, "memory"
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
        self.completed: dict[int, object] = {}  # what a checkpoint has besides tensors, by complete steps
        self.complete()
        self.saving: Saving | None = None
        self.unsaved: ConfigError | None = None  # why a save failed, for the next call that waits for it
        self.set_after: dict[int, list[tuple[int, str, float]]] = {}  # options of the optimizer, by step
        self.last: Failed | None = None
        self.failed_at: float | None = None  # since when no worker runs
        self.phases = Phases()
        self.good = 0
        self.times = StepTimes()
        self.stragglers = Stragglers(program.plans)

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch."""
        if self.done not in self.completed:  # the loop is the user's own
            self.completed[self.done] = with_states(states_of(self.program.job.callbacks), None)
        self.held[self.done + 1] = batch
        if self.times.begin(batch) and self.run is not None:
            self.starter.expect(self.run, self.stall)

        def act(run: Recoverable) -> StepResult:
            self._protect(run)
            began = monotonic()
            result = run.step(batch)
            self.times.add(monotonic() - began)
            return result

        result = self._call(act, self.done + 1)
        self.done += 1
        self.results[self.done] = result
        self.held.pop(self.done - self._kept, None)
        self.results.pop(self.done - RESULTS, None)
        self._passed()
        return result

    @property
    def _kept(self) -> int:
        """Return for how many steps everything is held that their repetition needs."""
        return max(KEPT, self.versions.every + 2)

    def complete(self) -> None:
        """Note that all of the last step is done: it is evaluated, and callbacks have run."""
        self.completed[self.done] = with_states(states_of(self.program.job.callbacks), self.position())
        self.completed.pop(self.done - self._kept, None)

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
        for agent in self.starter.warmed():
            self.notify(warm(agent, self.done))

    @property
    def stall(self) -> float:
        """Return the seconds without progress after which the job has stalled."""
        return self.times.stall(self.options.timeout) if self.given_stall is None else self.given_stall

    def _call(self, act: Callable[[Recoverable], T], step: int | None = None) -> T:
        """Return what a method returns, over as many failures as there are retries. step: under way."""
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
        version = self._newest()
        path, first, options = self._origin()
        fresh = version is None and self._unchanged(first)
        if not fresh and (version is None or not self._held(version)):
            self._start_from_disk()
            return
        blank = not fresh and self.versions.whole
        self.run = self._launch(replace(options, blank=True) if blank else options)
        self.starter.expect(self.run, self.given_stall or self.options.timeout)
        with self.phases.timed("load"):
            if path is not None and not blank:
                older = () if fresh else self._past()  # what no step writes is the same in all of them
                first_intact(self.run.read, [Path(path), *older])
            if version is None:
                self.unread, version = dict(self.run.unread), first
            else:
                self.versions.forget(lambda step: step > version)  # half of one may be there
                if not blank:
                    self.run.protect()  # what no step writes, which was lost
                self.run.restore(version, self.unread)
                self.protected = True
        self._replay(self.run, version, self.held.__getitem__)
        if self.failed_at is not None:
            self._recovered(version)

    def _start_from_disk(self) -> None:
        """Start all workers from the newest checkpoint, and repeat all steps since then."""
        past = self._past()
        if self.disk is None or not past:
            raise no_version(self.done)
        self.run = self._launch(replace(self.options, blank=True))
        with self.phases.timed("load"):
            self.versions.forget(lambda step: True)  # also what new agents have held before
            path, found = first_intact(self.run.read, past)
            self.unread, self.protected = dict(self.run.unread), False
        batches = self.disk.batches(found)
        self._replay(self.run, found.step, lambda step: next(batches))
        self.source = str(path)
        self._recovered(found.step)

    def _launch(self, options: Options) -> Recoverable:
        """Start all workers."""
        try:
            with self.phases.timed("start"):
                run = self.starter.start(options)
        finally:
            for machine in self.starter.passed_over():
                self.notify(skipped(machine, self.at))
        self.phases.part("start", "warm", self.starter.waited)
        return run

    def _origin(self) -> tuple[Path | str | None, int, Options]:
        """Return what workers begin with where there is no version: a checkpoint, its step, and options."""
        return *self.begun, self.options

    def _past(self) -> Sequence[Path]:
        """Return the checkpoints of steps whose results were returned, the newest first."""
        return () if self.disk is None else self.disk.past(self.done)

    def _newest(self) -> int | None:
        """Return the newest complete version of a step whose result was returned. None: there is none."""
        return self.versions.newest(self.done)

    def _unchanged(self, first: int) -> bool:
        """Return whether the state that the run began with, after step `first`, leads to the next step."""
        return self.done == first

    def _held(self, version: int) -> bool:
        """Return whether the batches of the steps after a version are all held."""
        return all(step in self.held for step in range(version + 1, self.done + 1))

    def _replay(self, run: Recoverable, version: int, batch: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Repeat the steps after a version, and the save that was under way."""
        under_way = self.at  # steps that are repeated are named by their own numbers
        self._give_up_saving(version)
        with self.phases.timed("replay"):
            for step in range(version, self.done + 1):
                if step > version:
                    self._repeat(run, step, batch(step))
                self._set_again(run, step)
                saving = self.saving
                if saving is not None and saving.step == step and not whole(saving.path):
                    try:
                        run.write(saving.path, saving.data, wait=False, keep=saving.keep)
                    except UnwrittenError as error:
                        self.unsaved = error
        self.at = under_way

    def _give_up_saving(self, version: int) -> None:
        """Discard the save that was under way if its state is gone: only that of a later step is held."""
        saving = self.saving
        if saving is not None and saving.step < version:
            self.saving = None
            if not whole(saving.path):
                discard(saving.path)
                self.unsaved = lost_save(saving, version)

    def _repeat(self, run: Recoverable, step: int, batch: Mapping[str, Tensor]) -> None:
        """Repeat a step, and compare its result with the one that was reported."""
        self.at = step
        again, before = run.step(batch), self.results.get(step)
        if before is not None and repr(again) != repr(before):  # NaN equals NaN
            self.notify(mismatch(step, before, again))

    def _failed(self, error: WorkerError | LaunchError) -> None:
        """End all workers. Raise the error if it is not to be tried again."""
        if self.failed_at is None:
            self.failed_at, self.phases = monotonic(), Phases()
        self.good = 0
        with self.phases.timed("end"):
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
        seconds, self.failed_at = monotonic() - self.failed_at, None
        source, self.source = self.source, "memory"
        replayed = self.done - version
        self.notify(recovery(self.at, version, source, replayed, seconds, self.phases, self.left))

    def _protect(self, run: Recoverable) -> None:
        """Copy the state that the run begins with."""
        if not self.protected:
            run.protect()
            self.protected = True

    def begin(self) -> None:
        """Start all workers."""
        self._call(lambda run: None)

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        """Write a checkpoint; `data`: with the states of callbacks, if they have any."""
        self.settle()
        self.saving = None if wait else Saving(step=self.done, path=Path(path), data=data, keep=keep)
        self._call(lambda run: run.write(path, data, wait=wait, keep=keep))

    def read(self, path: Path | str) -> Resumed:
        """Let workers go on from a checkpoint, and callbacks as they are."""
        found = self._call(lambda run: run.read(path))
        self.versions.forget(lambda step: True)
        assert self.run is not None
        self.unread, self.protected = dict(self.run.unread), False
        self.begun, self.saving = (path, found.step), None
        for known in (self.held, self.results, self.set_after):
            known.clear()
        return found

    def resumed(self, found: Resumed, *, newest: bool) -> Resumed:
        """Continue with the steps, the data and the states of callbacks that a checkpoint has."""
        super().resumed(found, newest=newest)
        self.completed.clear()
        self.complete()
        return found

    def settle(self) -> None:
        """Wait until the save that is under way is complete."""
        try:
            self._call(lambda run: run.settle())
        except ConfigError as error:
            self.unsaved = error
        unsaved, self.unsaved, self.saving = self.unsaved, None, None
        if unsaved is not None:
            raise unsaved

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group of the optimizer, from the next step on."""
        self._call(lambda run: run.set_optimizer_option(group, key, value))
        self.set_after.setdefault(self.done, []).append((group, key, value))

    def _set_again(self, run: Recoverable, step: int) -> None:
        """Set the options that were set after a step, because the version of that step is older."""
        for group, key, value in self.set_after.get(step, ()):
            run.set_optimizer_option(group, key, value)

    def flush(self, folder: Path) -> int | None:
        """End all workers, and write the newest state of a complete step as a checkpoint. Return its step.

        For a step that takes longer than there is time. None: there is no version in memory.
        """
        self._end()
        for _ in range(GENERATIONS):
            step = self.versions.newest(max(self.completed))
            if step is None or whole(path := step_path(folder, step)):
                return step
            data = self.completed.get(step)
            unread, options = self.unread, self.set_after.get(step, ())
            with suppress(LaunchError):  # a machine that held it was lost: is another version complete?
                write_version(
                    self.program, self.versions, step, path, unread=unread, data=data, options=options
                )
                return step
        return None

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return self.run is not None and self.run.leaving()

    def close(self) -> None:
        """End every worker. Idempotent."""
        if self.run is not None:
            run, self.run = self.run, None
            run.close()


@contextmanager
def recovering(
    program: ProgramLike,
    on: str,
    options: Options,
    *,
    spares: int = 0,
    make: Callable[..., RecoveringRun] = RecoveringRun,
    **asked: Any,  # noqa: ANN401  as the run has them: retries, stall, notify, disk
) -> Iterator[RecoveringRun]:
    """Start a program on workers that are replaced when they are lost, and end them with the block.

    on: inline, local or ray. spares: workers more than devices, for which resources are claimed.
    """
    with ExitStack() as held:
        versions = versions_of(program.plans, on)
        held.callback(versions.close)
        starter = starter_of(program, on, versions, spares)
        held.callback(starter.close)
        run = make(program, options, starter, versions, **asked)
        held.callback(run.close)
        run.begin()
        yield run
