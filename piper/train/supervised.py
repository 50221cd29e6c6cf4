"""`piper train` under a supervisor: when the driver is killed, another one takes its place.

What the drivers share is held by the supervisor: versions of the state, the journal and the fork server. What
runs is forked from the supervisor, with the program as it was compiled and proven.
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import IO, cast

from piper.checkpoint.metadata import Trainer
from piper.compiler import Program
from piper.data.feed import Feed
from piper.errors import PiperError, WorkerError
from piper.launchers.base import Resumed, Run
from piper.launchers.launch import recovers
from piper.launchers.processes import gone
from piper.launchers.transport.fork_server import ForkConnection, ForkServer
from piper.launchers.transport.serialize import Codec
from piper.launchers.transport.versions import Versions
from piper.recovery.elastic import ElasticRun
from piper.recovery.journal import Journal, Progress, states_of
from piper.recovery.moving_states import MovingStates
from piper.recovery.recovering_run import RecoveringRun
from piper.recovery.retrying import Saving
from piper.recovery.run_events import failure
from piper.recovery.starters import Kept
from piper.recovery.supervisor import Ended, Supervisor
from piper.train.event_log import EventLog
from piper.train.interrupt import PreemptedError
from piper.train.measure import Measure
from piper.train.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The place of one driver in a run."""

    memory: tuple[Versions, Versions]  # an elastic run uses them in turn, any other the first
    journal: Journal
    forks: ForkConnection
    left: int  # retries
    failed_at: float | None = None  # when the driver before it was killed. None: it is the first
    progress: Progress | None = None  # of the driver before it. None: no step was complete
    states: MovingStates | None = None  # the folder of states that move. None: the job is not elastic

    @property
    def takes_over(self) -> bool:
        """Return whether an earlier driver has left a state, which is saved if a signal ends this one."""
        return self.progress is not None

    def kept(self, feed: Feed, positions: dict[int, object]) -> Kept:
        """Return what outlives this driver. positions: of the data by step, filled in by `take_over`."""
        take = partial(self.take_over, feed=feed, positions=positions)
        return Kept(versions=self.memory[0], forks=self.forks, take_over=take, begins=not self.takes_over)

    def take_over(self, run: RecoveringRun, feed: Feed, positions: dict[int, object]) -> None:
        """Let a run and its data go on where the driver before it was."""
        if self.failed_at is not None:
            self.forks.clear()  # no worker of that driver may write versions any more
        run.left, run.failed_at = self.left, self.failed_at
        progress = self.progress
        if isinstance(run, ElasticRun):
            run.memory, run.states = self.memory, self.states
            if progress is not None and progress.layout is not None:
                run.take(progress.layout)
        if progress is None:
            run.versions.forget(lambda step: True)
            return
        found, completed, data = states_of(progress)
        positions |= found
        run.versions.forget(lambda step: step > progress.done)
        begun = self.journal.beginning()
        run.begun, run.unread, run.results = (
            (begun.path, begun.done),
            dict(begun.unread),
            dict(progress.results),
        )
        run.set_after = {step: [*options] for step, options in progress.options.items()}
        if progress.saving is not None:
            step, path, keep = progress.saving
            run.saving = Saving(step=step, path=Path(path), data=data, keep=keep)
        run.resumed(Resumed(step=progress.done, callbacks=completed[progress.done]))
        run.completed = {**completed, **run.completed}  # a version may be of an earlier step
        version = run.versions.newest(progress.done)
        first = version if version in positions else progress.done
        assert first is not None
        feed.seek(first, cast("Mapping[str, object] | None", positions.get(first)))
        run.held |= {step: next(feed) for step in range(first + 1, progress.done + 1)}

    def begin(self, run: Run, positions: Mapping[int, object], trainer: Trainer | None) -> None:
        """Note how the run begins."""
        assert isinstance(run, RecoveringRun)
        self.journal.begin(run, trainer)
        self.commit(run, positions, ended=False)

    def commit(self, run: Run, positions: Mapping[int, object], *, ended: bool) -> None:
        """Note that a step is complete."""
        assert isinstance(run, RecoveringRun)
        self.journal.commit(run, positions, ended=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a driver returns or raises."""

    outcome: Mapping[str, object] | None = None  # fields of an `Outcome`, without its folder
    preempted: bool = False
    what: str | None = None  # of an error
    by: str = ""
    facts: Mapping[str, str] | None = None
    hint: str = ""
    notes: tuple[str, ...] = ()


MONITORS = ("tqdm._monitor",)  # its threads only watch, and start again when they are needed
CODEC = Codec((Answer, Measure))


def answered(act: Callable[[Driver], Outcome], driver: Driver) -> bytes:
    """Return what a driver returns or raises as a message."""
    try:
        outcome = act(driver)
        shown = {
            field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name != "folder"
        }
        answer = Answer(outcome=shown)
    except KeyboardInterrupt as error:
        answer = Answer(preempted=isinstance(error, PreemptedError))
    except PiperError as error:
        notes = tuple(getattr(error, "__notes__", ()))
        answer = Answer(what=error.what, by=error.by, facts=error.facts, hint=error.hint, notes=notes)
    return CODEC.encode(answer)


def result(ended: Ended, folder: Path) -> Outcome:
    """Return or raise what a driver has returned or raised."""
    if ended.code or not ended.answer:
        sys.exit(ended.code)
    answer = CODEC.decode(ended.answer)
    assert isinstance(answer, Answer)
    if answer.outcome is not None:
        return Outcome(folder=folder, **answer.outcome)  # type: ignore[arg-type]  # they are its fields
    if answer.what is None:
        raise PreemptedError if answer.preempted else KeyboardInterrupt
    error = PiperError(answer.what, by=answer.by, facts=answer.facts, hint=answer.hint)
    for note in answer.notes:
        error.add_note(note)
    raise error


def supervises(on: str, program: Program, shown: IO[str]) -> bool:
    """Return whether a killed driver of a run can be replaced; `shown`: where it prints to.

    A fork has none of the recipe's threads, cannot use CUDA where the program was captured on it, and what it
    prints into memory, in a notebook for example, is not seen.
    """
    try:
        shown.fileno()
    except OSError:
        return False
    can = on == "local" and recovers(on) and sys.platform == "linux" and program.device == "cpu"
    threads = [one for one in threading.enumerate() if type(one).__module__ not in MONITORS]
    return can and threads == [threading.main_thread()]


def supervise(
    act: Callable[[Driver], Outcome], program: Program, folder: Path, retries: int, events: EventLog
) -> Outcome:
    """Return the outcome of a run, over as many drivers as there are retries."""
    supervisor, left, failed_at, progress = Supervisor(), retries, None, None
    before: tuple[int, int] | None = None  # how and after which step the last driver ended
    with ExitStack() as held:
        held.enter_context(supervisor.passing())  # between two drivers too: the next one saves
        memory = (Versions(program.plans), Versions(program.plans))
        journal, servers = Journal(), [ForkServer()]
        for versions in memory:
            held.callback(versions.close)
        held.callback(journal.close)
        held.callback(lambda: servers[0].close())
        states = None if program.job.elastic is None else MovingStates()
        if states is not None:
            held.callback(states.close)
        while True:
            if gone(servers[0].server):
                servers[0].close()
                servers[0] = ForkServer()
            forks = servers[0].lend()
            driver = Driver(
                memory=memory,
                journal=journal,
                forks=forks,
                left=left,
                failed_at=failed_at,
                progress=progress,
                states=states,
            )
            ended = supervisor.run(partial(answered, act, driver), held=driver.takes_over)
            forks.close()
            if ended.code >= 0:
                return result(ended, folder)
            if supervisor.asked:
                raise PreemptedError if supervisor.preempted else KeyboardInterrupt
            progress, failed_at = journal.progress(), monotonic()
            if states is not None:
                states.clear(moved(progress))
            done = 0 if progress is None else progress.done
            if progress is not None and (before is None or before[1] != done):
                left = progress.left
            error = lost(ended, done)
            crashed = ended.code != -signal.SIGKILL  # else it was not killed by what it did
            if left < 1 or (crashed and before == (ended.code, done)):
                raise error
            before, left = (ended.code, done), left - 1
            events(failure(error, done + 1, left))


def moved(progress: Progress | None) -> Path | None:
    """Return the state that the next driver needs, as it moves to another layout. None: there is none."""
    layout = None if progress is None else progress.layout
    return None if layout is None or layout.moved is None else Path(layout.moved[0])


def lost(ended: Ended, done: int) -> WorkerError:
    """Return the error of a driver that was killed."""
    return WorkerError(
        f"the driver was killed by {signal.Signals(-ended.code).name}",
        by=f"process {ended.process}",
        facts={"after": f"step {done}"},
        hint="is the machine out of memory? --resume goes on from the newest checkpoint",
    )
