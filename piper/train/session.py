"""One run from start to end: compile, launch, start or resume, train, and return the outcome."""

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from rich.console import Console

from piper.checkpoint.metadata import DamagedError, Trainer, read_record
from piper.compiler import Program, compile
from piper.data.feed import Feed
from piper.format import count
from piper.job import Job
from piper.launchers.base import Run, StepResult
from piper.launchers.launch import check_launcher, launcher
from piper.plan.memory_timeline import timeline
from piper.plan.plan import Plans
from piper.recovery.recovering_run import RecoveringRun, recovering
from piper.recovery.run_events import Event
from piper.runtime.batch import wanted_batch
from piper.runtime.setup import setup_of
from piper.runtime.worker import Options
from piper.train.board import board
from piper.train.display import Stages, display
from piper.train.elastic_programs import Programs, SizeFile
from piper.train.evaluations import Evaluations, evaluation_line
from piper.train.event_log import EventLog
from piper.train.interrupt import Interrupts, PreemptedError, interrupts, preemptible
from piper.train.lock import locked
from piper.train.loop import Course, Reporter, Result, checked, train
from piper.train.measure import Measure, Rate, unit_of
from piper.train.nans import first_bad
from piper.train.outcome import Outcome, RunSummary
from piper.train.profiling import check_profile, profile_of, save_profile
from piper.train.run_folder import Metrics, choose, claim, prepare, record
from piper.train.saving import checkpoints_of, disk_of, go_on, past_of, prepare_saves, saves_of
from piper.train.train_options import (
    TrainOptions,
    asked_job,
    check_options,
    recovering_asked,
    reserve,
)

KEPT = 3  # the last steps, at least, of which the position of the data is kept


class ConsoleLog(logging.Handler):
    """Prints what the package logs, such as that a program is compiled for another shape of batches."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console, self.log = console, logging.getLogger("piper")

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        self.console.print(self.format(record), markup=False)

    def __enter__(self) -> None:
        self.log.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self.log.removeHandler(self)


def train_recipe(asked: TrainOptions, console: Console) -> Outcome:
    """Train a recipe as asked, with a display on the console."""
    check_launcher(asked.on, "piper train")
    check_options(asked)
    with preemptible():
        return train_locked(asked, console)


def train_locked(asked: TrainOptions, console: Console) -> Outcome:
    """Train a recipe in its folder, which no other run uses meanwhile."""
    job = asked_job(asked)
    check_profile(asked.profile, job.steps)
    folder = choose(asked.out, asked.recipe, asked.resume)
    claim(folder)
    with ExitStack() as held:
        if (warning := held.enter_context(locked(folder))) is not None:
            console.print(warning)
        prepare(folder, job, asked.resume)
        where = prepare_saves(folder, job, asked.resume)
        if where is not None and not where.resolve().is_relative_to(folder.resolve()):
            held.enter_context(locked(where))  # runs of other folders may save there too
        return train_in(folder, job, asked, console)


def train_in(folder: Path, job: Job, asked: TrainOptions, console: Console) -> Outcome:
    """Train a job in a folder that no other run uses."""
    past = past_of(folder, job) if asked.resume else []
    if asked.resume and not past:
        console.print(f"{folder} has no complete checkpoint yet: starting at the first step")
    console.print(f"Compiling {asked.recipe}")
    with Stages(console):
        program = compile(job, device=asked.device, compile=asked.compile)
    for warning in program.warnings:
        console.print(f"Warning: {warning}")
    record(folder, program, asked.recipe, asked.on, job.steps)
    console.print(f"Proven. Starting {count(len(program.plans.devices), 'device')} on {asked.on}")
    return train_program(folder, program, asked, console, past)


def train_program(
    folder: Path,
    program: Program,
    asked: TrainOptions,
    console: Console,
    past: Sequence[Path | DamagedError],
) -> Outcome:
    """Train a compiled job."""
    job, memory, events = program.job, RunSummary(), EventLog(folder, console.print)
    session = Session(
        folder=folder, program=program, asked=asked, console=console, feed=Feed(job.data, job.seed)
    )
    options = worker_options(asked, blank=bool(past))
    with watched_start(console, started(program, folder, asked, options, events)) as run:
        begun = begin(run, past, session.feed, session.positions, console)
        check_profile(asked.profile, job.steps - begun.done)
        preempting = partial(stopping_now, console, events, memory, asked.grace, begun.done)
        with (
            watching(console, folder, program, begun.done, memory) as tell,
            interrupts(preempting, asked.grace - reserve(asked)) as interrupted,
        ):
            done = session.train(run, begun, tell, interrupted)
        if asked.profile:
            found = profile_of(run, program, asked.recipe, asked.on, begun.done)
            console.print(save_profile(found, folder))
    return Outcome(
        folder=folder,
        done=done,
        steps=max(job.steps, done),
        saved=job.checkpoint is not None,
        seconds=memory.seconds,
        first=memory.first,
        last=memory.last,
        preempted=interrupted.preempted,
    )


def worker_options(asked: TrainOptions, *, blank: bool) -> Options:
    """Return the options of workers. blank: they start without values, because a checkpoint is loaded."""
    return Options(
        keep_outputs=asked.detect_nan,
        profile=asked.profile,
        graphs=asked.graphs,
        blank=blank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The part of a run that this process drives: its job, its folder and its data."""

    folder: Path
    program: Program
    asked: TrainOptions
    console: Console
    feed: Feed
    positions: dict[int, object] = field(default_factory=dict)  # of the data, by the steps done; the last few

    def train(self, run: Run, begun: "Begun", tell: Reporter, interrupted: Interrupts) -> int:
        """Train the steps that are left, and return how many are done."""
        with Evaluations(self.folder, begun.done) as evaluations:
            course = self._course(run, begun, tell, interrupted, evaluations)
            sizes = {p.name: p.shape for p in self.program.outline.parameters if p.trainable}
            rate = Rate(self.program.job, self.program.plans.buckets.values(), begun.trainer, sizes)
            batches = checked(self.feed, wanted_batch(setup_of(self.program)))
            try:
                done = train(run, batches, rate, course)
                run.after_training(done)
            except PreemptedError:
                return flushed(run, self.folder, self.program.job, self.positions)
        return done

    def _course(
        self, run: Run, begun: "Begun", tell: Reporter, interrupted: Interrupts, evaluations: Evaluations
    ) -> Course:
        job, size_file = self.program.job, SizeFile(self.folder, self.console.print)

        def culprit() -> str | None:
            return first_bad(self.program.outline, run.trails(), run.state_dict())

        def after(step: int, result: Result) -> None:
            evaluated = run.after_step(step, cast(StepResult, result), job.steps)
            if evaluated is not None:
                evaluations.write(step, evaluated)
                self.console.print(evaluation_line(step, evaluated))
            size_file.obey(run)

        return Course(
            done=begun.done,
            steps=job.steps,
            tell=partial(noting, tell, self.feed, self.positions, kept_positions(self.program.plans)),
            saves=saves_of(run, self.folder, job, self.feed, self.console.print, run.after_saving),
            stopping=lambda: stopping(run, interrupted) or run.stopping,
            culprit=culprit if self.asked.detect_nan else None,
            after=after,
            complete=run.complete if isinstance(run, RecoveringRun) else lambda: None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Where a run has begun."""

    done: int  # steps before
    trainer: Trainer | None = None  # of the checkpoint that it began from


def begin(
    run: Run,
    past: Sequence[Path | DamagedError],
    feed: Feed,
    positions: dict[int, object],
    console: Console,
) -> Begun:
    """Return where a run begins. Let it take up its newest checkpoint, if there is one."""
    done, trainer = 0, None
    if past:
        path, done = go_on(run, past, feed, console.print)
        console.print(f"Going on from {path}, after step {done}")
        trainer = read_record(path).trainer
    positions[done] = feed.state_dict() if done else None
    return Begun(done=done, trainer=trainer)


@contextmanager
def watched_start(console: Console, starting: AbstractContextManager[Run]) -> Iterator[Run]:
    """Start a run, show the stages of its start, and print what the package logs until the run ends."""
    with ExitStack() as held:
        with Stages(console):
            run = held.enter_context(starting)
        with ConsoleLog(console):
            yield run


@contextmanager
def started(
    program: Program,
    folder: Path,
    asked: TrainOptions,
    options: Options,
    notify: EventLog,
) -> Iterator[Run]:
    """Start a run, and end it with the block. It recovers from failures if asked to and possible."""
    with ExitStack() as held:
        if not recovering_asked(asked):
            yield held.enter_context(launcher(program, asked.on, options))
            return
        programs = Programs(program)
        held.callback(programs.close)
        run = held.enter_context(
            recovering(
                program,
                asked.on,
                options,
                retries=asked.retries,
                stall=asked.stall,
                notify=notify,
                disk=disk_of(folder, program.job),
                spares=asked.spares,
                make=programs.run,
            )
        )
        programs.prepare()
        yield run


def stopping(run: Run, interrupted: Interrupts) -> bool:
    """Return whether a run is to end after this step: a signal came to this process, or to a worker."""
    if run.leaving() and not interrupted.preempted:
        interrupted.handle(signal.SIGTERM, None)
    return interrupted()


def kept_positions(plans: Plans) -> int:
    """Return for how many of the last steps to keep the position of the data: the oldest version needs it."""
    return KEPT if plans.protection is None else max(KEPT, plans.protection.every + 2)


def noting(tell: Reporter, feed: Feed, positions: dict[int, object], kept: int, measure: Measure) -> None:
    """Pass on the measures of a step, and note the position of the data after it."""
    tell(measure)
    positions[measure.step] = feed.state_dict()
    positions.pop(measure.step - kept, None)


def flushed(run: Run, folder: Path, job: Job, positions: Mapping[int, object]) -> int:
    """Write the newest version in memory as a checkpoint, because a step does not end in time."""
    where = checkpoints_of(folder, job)
    step = run.flush(where, positions) if isinstance(run, RecoveringRun) and where is not None else None
    if step is None:
        raise PreemptedError
    return step


def stopping_now(
    console: Console, events: EventLog, memory: RunSummary, grace: float, done: int, number: int
) -> None:
    """Say that the run ends after this step. A terminal that hung up is not written to any more.

    done: the steps before this run.
    """
    if number == signal.SIGHUP and console.is_terminal:
        console.file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for the rest of the run
    if number == signal.SIGTERM:
        last = memory.last
        what = f"preempted: saving after this step, within {grace:g} s"
        events(Event(event="preemption", step=(done if last is None else last.step) + 1, what=what))
    else:
        console.print("Stopping after this step; once more to stop now")


@contextmanager
def watching(
    console: Console, folder: Path, program: Program, done: int, memory: RunSummary
) -> Iterator[Reporter]:
    """Yield a function that passes the measures of a step to the metrics file first, then to the displays."""
    with ExitStack() as held:
        watchers: list[Reporter] = [memory, held.enter_context(Metrics(folder, done))]
        if (written := held.enter_context(board(folder, done))) is not None:
            watchers.append(written)
        programs = (program, *program.shapes.values())
        peak = max(timeline(plan).peak for one in programs for plan in one.plans)
        unit = unit_of(program.outline.batch)
        watchers.append(held.enter_context(display(console, done, program.job.steps, peak, unit)))

        def tell(measure: Measure) -> None:
            for watcher in watchers:
                watcher(measure)

        yield tell
