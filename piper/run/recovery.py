"""Sessions of a run whose workers may be lost. Every failure takes one path: no step, sample or bit is lost.

All workers are ended and started again, from a process that has torch imported and from the program as it
was compiled and proven. They take the newest complete version of the state from memory, see [Note: versions],
and repeat the steps since then, at most two, on the batches that are still held. A step is a function of the
state, the batch and the step's number, so it gives the same bits again. That is compared.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor

from piper.checkpoint.folder import discard, step_path, whole
from piper.checkpoint.target import UnwrittenError
from piper.errors import ConfigError, LaunchError, PiperError, WorkerError
from piper.plan.protected import GENERATIONS
from piper.run.checkpointing import ended, with_states
from piper.run.driver_checkpoints import write_version
from piper.run.launch import starter_of
from piper.run.run import Run, start_run
from piper.run.run_events import (
    Disk,
    Event,
    Notify,
    Phases,
    Saving,
    StepTimes,
    Stragglers,
    failure_event,
    first_intact,
    repeatable,
)
from piper.run.session import Session, Sessions
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.results import Batch, Resumed, StepResult
from piper.workers.transport.versions import Versions

T = TypeVar("T")
REFILL = 100  # good steps after which all retries are there again
KEPT = 3  # batches that are held: those of steps that may be repeated, and of the next
RESULTS = 10_000  # results that are held, to compare repeated steps with


class Recovery(Sessions):
    """Sessions that follow each other when workers are lost, as long as there are retries."""

    closed = False
    moved: tuple[Path, int] | None = None  # a state that has moved here from another layout, and its step

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
        """Prepare the first session; `stall`: seconds without progress that are a failure, else by steps."""
        super().__init__(program, options, starter)
        self.disk, self.versions = disk, versions
        self.retries = self.left = retries
        self.given_stall, self.notify = stall, notify
        self.begun: tuple[Path | str | None, int] = (None, 0)  # the checkpoint that it began from, its step
        self.unread: dict[str, Tensor] = {}
        self.protected = False  # the state that it began with is in memory
        self.at = 0  # the step under way
        self.batches: dict[int, Batch] = {}
        self.results: dict[int, StepResult] = {}
        self.completed: dict[int, object] = {}  # what a checkpoint has besides tensors, by complete steps
        self.completed[self.done] = with_states(program.job.callbacks, None)
        self.saving: Saving | None = None
        self.unsaved: ConfigError | None = None  # why a save failed, for the next call that waits for it
        self.set_after: dict[int, list[tuple[int, str, float]]] = {}  # options of the optimizer, by step
        self.last: tuple[object, ...] | None = None  # the last failure, if it can come a second time
        self.failed_at: float | None = None  # since when no worker runs
        self.phases = Phases()
        self.good = 0
        self.times = StepTimes()
        self.stragglers = Stragglers(program.plans)

    def step(self, batch: Batch) -> StepResult:
        if self.done not in self.completed:  # the loop is the user's own
            self.completed[self.done] = with_states(self.program.job.callbacks, None)
        self.batches[self.done + 1] = batch
        self.times.begin(batch)
        if self.current is not None and self.good:  # the first step of new workers has all the time there is
            self.starter.expect(self.current.group, self.stall)
        result = super().step(batch)
        self.results[self.done] = result
        self.batches.pop(self.done - self._kept, None)
        self.results.pop(self.done - RESULTS, None)
        self.last = None
        self.good += 1
        if self.good >= REFILL:
            self.left = self.retries
        if self.current is not None:
            for event in self.stragglers.note(self.done, self.current.busy):
                self.notify(event)
        self.starter.notice()
        while self.starter.warmed:
            address, took = self.starter.warmed.popleft()
            who = f"agent on {address}"
            self.notify(Event(event="warm", step=self.done, who=who, seconds=round(took, 3)))
        return result

    def _step(self, batch: Batch) -> StepResult:
        self._protect()
        began = monotonic()
        result = super()._step(batch)
        self.times.add(monotonic() - began)
        return result

    @property
    def _kept(self) -> int:
        """Return for how many steps everything is held that their repetition needs."""
        return max(KEPT, self.versions.every + 2)

    def complete(self, data: Callable[[], object]) -> None:
        """Note that all of the last step is done: it is evaluated, and callbacks have run."""
        self.completed[self.done] = data()
        self.completed.pop(self.done - self._kept, None)

    @property
    def stall(self) -> float:
        """Return the seconds without progress after which the job has stalled."""
        return self.times.stall(self.options.timeout) if self.given_stall is None else self.given_stall

    def call(self, act: Callable[[], T], *, steps: int = 0) -> T:
        """Return what a function returns, over as many failures as there are retries."""
        while True:
            if self.closed:
                raise ended()
            self.at = self.done + steps
            try:
                if self.current is None:
                    self._start()
                return act()
            except (WorkerError, LaunchError) as error:
                if isinstance(error, LaunchError) and self.failed_at is None:
                    raise  # it never ran
                self._fail(error)

    def begin(self) -> None:
        self.call(lambda: None)

    def _start(self) -> None:
        """Start all workers, let them take the newest state there is, and repeat the steps since then."""
        version = self.versions.newest(self.done)
        (path, first), options = self.moved or self.begun, self.options
        options = options if self.moved is None else replace(options, blank=True)
        unchanged = self.done == first if self.moved is None else self._has_batches(first)
        fresh = version is None and unchanged  # what the run began with leads to the next step
        if not fresh and (version is None or not self._has_batches(version)):
            self._start_from_disk()
            return
        blank = not fresh and self.versions.whole
        session = self.current = self._launch(replace(options, blank=True) if blank else options)
        self.starter.expect(session.group, self.given_stall or self.options.timeout)
        with self.phases.timed("load"):
            if path is not None and not blank:
                older = () if fresh else self._past()  # what no step writes is the same in all of them
                first_intact(session.read, [Path(path), *older])
            if version is None:
                self.unread, version = dict(session.unread), first
            else:
                self.versions.forget(lambda step: step > version)  # half of one may be there
                if not blank:
                    session.protect()  # what no step writes, which was lost
                session.restore(version, self.unread)
                self.protected = True
        self._replay(session, version, self.batches.__getitem__)
        if self.failed_at is not None:
            self._recovered(version)

    def _start_from_disk(self) -> None:
        """Start all workers from the newest checkpoint, and repeat all steps since then."""
        past = self._past()
        if self.disk is None or not past:
            raise WorkerError(
                "no version of the state is complete in memory",
                by=f"recovery, after step {self.done}",
                hint="--resume goes on from the newest checkpoint",
            )
        session = self.current = self._launch(replace(self.options, blank=True))
        with self.phases.timed("load"):
            self.versions.forget(lambda step: True)  # also what new agents have held before
            path, loaded = first_intact(session.read, past)
            self.unread, self.protected = dict(session.unread), False
        batches = self.disk.batches(loaded)
        self._replay(session, loaded.step, lambda step: next(batches))
        self._recovered(loaded.step, str(path))

    def _launch(self, options: Options) -> Session:
        """Start all workers."""
        try:
            with self.phases.timed("start"):
                session = self.open(options)
        finally:
            while self.starter.passed_over:
                machine = self.starter.passed_over.popleft()
                who = f"machine {machine.address}"
                self.notify(Event(event="skipped", step=self.at, who=who, what=machine.why))
        self.phases.part("start", "warm", self.starter.waited)
        return session

    def _past(self) -> Sequence[Path]:
        """Return the checkpoints of steps whose results were returned, the newest first."""
        return () if self.disk is None else self.disk.past(self.done)

    def _has_batches(self, version: int) -> bool:
        """Return whether the batches of the steps after a version are all held."""
        return all(step in self.batches for step in range(version + 1, self.done + 1))

    def _replay(self, session: Session, version: int, batch: Callable[[int], Batch]) -> None:
        """Repeat the steps after a version, and the save that was under way."""
        under_way = self.at  # steps that are repeated are named by their own numbers
        self._give_up_saving(version)
        with self.phases.timed("replay"):
            for step in range(version, self.done + 1):
                if step > version:
                    self.at = step
                    again, before = session.step(batch(step)), self.results.get(step)
                    if before is not None and repr(again) != repr(before):  # NaN equals NaN
                        first = f"loss {before.loss!r} and gradient norm {before.grad_norm!r} at first"
                        what = f"{first}, {again.loss!r} and {again.grad_norm!r} when repeated"
                        self.notify(Event(event="mismatch", step=step, what=what))
                for group, key, value in self.set_after.get(step, ()):  # the version is older than these
                    session.set_optimizer_option(group, key, value)
                saving = self.saving
                if saving is not None and saving.step == step and not whole(saving.path):
                    try:
                        session.write(saving.path, saving.data, wait=False, keep=saving.keep)
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
                then = f"from the state after step {version}, which is newer"
                self.unsaved = UnwrittenError(
                    f"the checkpoint of step {saving.step} was not complete when workers were lost",
                    by="save",
                    facts={"path": str(saving.path), "goes on": then},
                    hint="nothing is lost but this checkpoint; the next save is complete again",
                )

    def _fail(self, error: WorkerError | LaunchError) -> None:
        """End all workers. Raise the error if it is not to be tried again."""
        if self.failed_at is None:
            self.failed_at, self.phases = monotonic(), Phases()
        self.good = 0
        with self.phases.timed("end"):
            self._end()
        now = repeatable(error, self.at)
        if self.left < 1 or (now is not None and now == self.last):
            raise error
        self.last = now
        self.left -= 1
        self.notify(failure_event(error, self.at, self.left))

    def _end(self) -> None:
        if self.current is not None:
            with suppress(PiperError):  # a save that was under way: the failure is what matters
                self.current.close()
            self.current = None

    def _recovered(self, version: int, source: str = "memory") -> None:
        assert self.failed_at is not None
        seconds, self.failed_at = monotonic() - self.failed_at, None
        event = Event(
            event="recovery",
            step=self.at,
            version=version,
            source=source,
            replayed=self.done - version,
            seconds=round(seconds, 3),
            phases={name: round(took, 3) for name, took in self.phases.items()},
            left=self.left,
        )
        self.notify(event)

    def _protect(self) -> None:
        """Copy the state that the run begins with."""
        if not self.protected:
            self.session.protect()
            self.protected = True

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        self.settle()
        self.saving = None if wait else Saving(step=self.done, path=Path(path), data=data, keep=keep)
        super().write(path, data, wait=wait, keep=keep)

    def read(self, path: Path | str) -> Resumed:
        resumed = super().read(path)
        self.versions.forget(lambda step: True)
        self.unread, self.protected = dict(self.session.unread), False
        self.begun, self.saving = (path, resumed.step), None
        for known in (self.batches, self.results, self.set_after, self.completed):
            known.clear()
        return resumed

    def settle(self) -> None:
        try:
            super().settle()
        except ConfigError as error:
            self.unsaved = error
        unsaved, self.unsaved, self.saving = self.unsaved, None, None
        if unsaved is not None:
            raise unsaved

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        super().set_optimizer_option(group, key, value)
        self.set_after.setdefault(self.done, []).append((group, key, value))

    def flush(self, folder: Path, data: Callable[[], object]) -> int | None:
        """End all workers, and write the newest state of a complete step as a checkpoint. Return its step."""
        self._end()
        for _ in range(GENERATIONS):
            step = self.versions.newest(max(self.completed))
            if step is None or whole(path := step_path(folder, step)):
                return step
            then, options = self.completed.get(step), self.set_after.get(step, ())
            with suppress(LaunchError):  # a machine that held it was lost: is another version complete?
                given = self.program, self.versions, step, path
                write_version(*given, unread=self.unread, data=then, options=options)
                return step
        return None

    def close(self) -> None:
        """End every worker, what starts them, and the memory of versions. Idempotent."""
        self.closed = True
        try:
            super().close()
        finally:
            self.versions.close()


def recovering(
    program: ProgramLike,
    on: str,
    options: Options,
    *,
    spares: int = 0,
    make: Callable[..., Recovery] = Recovery,
    **asked: Any,  # noqa: ANN401  as the sessions have them: retries, stall, notify, disk
) -> Run:
    """Start a program on workers that are replaced when lost; `spares`: workers more than devices."""
    with ExitStack() as undo:
        starter = starter_of(program, on, protects=True, spares=spares)
        undo.callback(starter.close)
        versions = starter.versions
        assert versions is not None
        undo.callback(versions.close)
        sessions = make(program, options, starter, versions, **asked)
        undo.pop_all()
    return start_run(sessions)
