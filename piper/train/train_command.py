"""One run from start to end: compile, launch, start or resume, train, and return the outcome. Or one device.

`CommandWatch` is what `piper train` adds to the training loop: measures, evaluations, signals, `devices`.
"""

import os
import signal
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console

from piper.callbacks import Numbers, Running, StepNumbers
from piper.checkpoint.metadata import Trainer, read_record
from piper.compiler import Program, compile
from piper.data.feed import one_epoch
from piper.errors import ConfigError
from piper.ir.format import count, size
from piper.job import Job
from piper.plan.memory_timeline import timeline
from piper.recipe import load_recipe
from piper.run.checkpointing import checkpoints_of, past_of, prepare_saves
from piper.run.elastic import ElasticRecovery
from piper.run.launch import PeakMemory, check_launcher, check_share, launch_single_rank, launcher, place_of
from piper.run.recovery import Recovery, recovering
from piper.run.run import Run, Watch
from piper.run.run_events import Disk, Event
from piper.runtime.worker import Options
from piper.train.interrupt import Interrupts, PreemptedError, interrupts, preemptible
from piper.train.measure import (
    ConsoleLog,
    Measure,
    Outcome,
    Rate,
    Reporter,
    Stages,
    display,
    profile_of,
    save_profile,
    shown,
    tokens_in,
)
from piper.train.run_folder import EVALUATIONS, EventLog, LinesFile, choose, claim, locked, prepare, record
from piper.train.train_options import (
    SizeFile,
    TrainOptions,
    check_options,
    check_profile,
    recovering_asked,
    reserve,
    sizes_of,
)
from piper.view.provenance import METRICS
from piper.workers.results import Batch, EvaluationResult

STEPS = 5  # of one device, where none are asked for
WARM = 2  # the first ones, which take their memory and are left out


class CommandWatch(Watch):
    """Reports each step before it is saved: a run that ends between the two repeats and reports it again."""

    def __init__(
        self, console: Console, outcome: Outcome, rate: Rate, show: Reporter, interrupted: Interrupts
    ) -> None:
        folder = outcome.folder
        self.say, self.outcome, self.rate, self.show = console.print, outcome, rate, show
        self.metrics = LinesFile(folder / METRICS).keep(outcome.done)
        self.metrics.write()  # the file says that the folder holds a run, before its first step too
        self.evaluations = LinesFile(folder / EVALUATIONS).keep(outcome.done)
        self.devices, self.interrupted = SizeFile(folder, console.print), interrupted
        self.lr = self.began = self.seconds = 0.0
        self.samples = 0
        self.tokens: int | None = None

    def begin(self, step: int) -> None:
        """Note the rate of a step, and when it begins."""
        self.lr = self.rate.now
        self.rate.advance(step)  # first: a schedule that is too short is named here, not by a worker
        self.began = perf_counter()

    def on_option(self, group: int, key: str, value: float) -> None:
        """Note the rate that a callback has set."""
        self.rate.set_option(group, key, value)

    def end(self, batch: Batch) -> None:
        """Note how long a step took, and what it counts."""
        self.seconds = perf_counter() - self.began
        self.samples, self.tokens = len(next(iter(batch.values()))), tokens_in(batch)

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        """Report the measures of a step, to the metrics file before the display."""
        measure = Measure(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self.lr,
            tokens_per_s=None if self.tokens is None else self.tokens / self.seconds,
            samples_per_s=self.samples / self.seconds,
            step_s=self.seconds,
            metrics=result.metrics,
        )
        self.outcome.add(measure)
        self.metrics.write(measure.as_line())
        self.show(measure)

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        assert isinstance(result, EvaluationResult)
        self.evaluations.write({"step": step, **asdict(result)})
        numbers = f"loss {result.loss:.4f}{shown(result.metrics)}   {result.samples} samples"
        self.say(f"evaluation after step {step}   {numbers}")

    def between(self, run: Run) -> bool:
        """Return whether the run is to end after this step: a signal came to this process, or to a worker."""
        self.devices.obey(run)
        if run.sessions.leaving() and not self.interrupted.preempted:
            self.interrupted.handle(signal.SIGTERM, None)
        return self.interrupted()


def train_recipe(asked: TrainOptions, console: Console) -> Outcome:
    """Train a recipe as asked, with a display on the console."""
    check_launcher(asked.on, "piper train")
    check_share(asked.share, "piper train --share")
    check_options(asked)
    with preemptible(), ExitStack() as locks:
        job = load_recipe(asked.recipe, asked.strategy)
        job = job if asked.steps is None else replace(job, steps=asked.steps)
        check_profile(asked.profile, job.steps)
        folder = choose(asked.out, asked.recipe, asked.resume)
        claim(folder)
        if (warning := locks.enter_context(locked(folder))) is not None:
            console.print(warning)
        prepare(folder, job, asked.resume)
        where = prepare_saves(folder, job, lambda path: asked.resume)
        if where is not None and not where.resolve().is_relative_to(folder.resolve()):
            locks.enter_context(locked(where))  # runs of other folders may save there too
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
    where = place_of(program, asked.on, asked.share)
    record(folder, program, asked.recipe, where, job.steps)
    console.print(f"Proven. Starting {count(len(program.plans.devices), 'device')} on {where}")
    events = EventLog(folder, console.print)
    with Stages(console):
        run = start(program, folder, asked, events, blank=bool(past))
    outcome = Outcome(folder=folder, done=0, steps=job.steps, saved=job.checkpoint is not None)
    with run, ConsoleLog(console):
        run.folder = folder
        trainer: Trainer | None = None
        if past:
            resumed = run.load(folder)
            console.print(f"Going on from {resumed.path}, after step {resumed.step}")
            outcome.done, trainer = resumed.step, read_record(Path(resumed.path)).trainer
        run.saves_to = checkpoints_of(folder, job)  # which `train_recipe` has looked at
        first = outcome.done
        check_profile(asked.profile, job.steps - first)
        train_program(run, program, outcome, trainer, asked, events, console)
        if asked.profile:
            recorded = profile_of(run, program, asked.recipe, where, first)
            console.print(save_profile(recorded, folder))
    return outcome


def start(program: Program, folder: Path, asked: TrainOptions, events: EventLog, *, blank: bool) -> Run:
    """Start a run, which recovers from failures if asked to; `blank`: workers start without values."""
    options = Options(
        keep_outputs=asked.detect_nan,
        profile=asked.profile,
        graphs=asked.graphs,
        share=asked.share,
        blank=blank,
    )
    if not recovering_asked(asked):
        return launcher(program, asked.on, options)
    where = checkpoints_of(folder, program.job)
    return recovering(
        program,
        asked.on,
        options,
        retries=asked.retries,
        stall=asked.stall,
        notify=events,
        disk=None if where is None else Disk(where, program.job),
        spares=asked.spares,
        make=Recovery
        if program.job.elastic is None
        else partial(ElasticRecovery, sizes=sizes_of(program, *program.job.elastic)),
    )


def train_program(
    run: Run,
    program: Program,
    outcome: Outcome,
    trainer: Trainer | None,
    asked: TrainOptions,
    events: EventLog,
    console: Console,
) -> None:
    """Train to the last step or until asked to stop, else write the newest version; note the outcome."""
    job = program.job

    def stopping_now(number: int) -> None:
        """Say that the run ends after this step. A terminal that hung up is not written to any more."""
        if number == signal.SIGHUP and console.is_terminal:
            console.file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for the rest of the run
        if number == signal.SIGTERM:
            what = f"preempted: saving after this step, within {asked.grace:g} s"
            events(Event(event="preemption", step=outcome.done + 1, what=what))
        else:
            console.print("Stopping after this step; once more to stop now")

    sizes = {p.name: p.shape for p in program.outline.parameters if p.trainable}
    rate = Rate(job, sizes, trainer)
    programs = (program, *program.shapes.values())
    peak = max(timeline(plan).peak for one in programs for plan in one.plans)
    with (
        display(console, outcome.done, job.steps, peak) as show,
        interrupts(stopping_now, asked.grace - reserve(asked)) as interrupted,
    ):
        run.watch = CommandWatch(console, outcome, rate, show, interrupted)
        try:
            if run.done < job.steps:
                for _ in run.train():
                    pass
            outcome.done = run.done
        except PreemptedError:
            where = checkpoints_of(outcome.folder, job)
            step = None if where is None else run.flush(where)
            if step is None:
                raise
            outcome.done = step
    outcome.steps, outcome.preempted = max(job.steps, outcome.done), interrupted.preempted


def train_alone(asked: TrainOptions) -> "RankSummary":
    """Run a few steps of one device, `--on rank:N`, and return its times and memory. Write no files."""
    steps = STEPS if asked.steps is None else asked.steps
    warm = WARM + asked.graphs  # the step after the first ones is captured
    if steps <= warm:
        raise ConfigError(
            f"--steps {steps}", by=asked.on, hint=f"the first {warm} are not timed: take {warm + 1} or more"
        )
    job = replace(load_recipe(asked.recipe, asked.strategy), checkpoint=None)
    program = compile(job, device=asked.device, compile=asked.compile)
    options = Options(graphs=asked.graphs)
    with launch_single_rank(program, asked.on, options, cluster=asked.cluster) as run:
        for batch in islice(one_epoch(job.data, job.seed), steps):
            run.step(batch)
        return RankSummary(
            rank=asked.on,
            devices=len(run.plans.devices),
            on=run.network.name,
            times=tuple(run.seconds[warm:] or run.seconds),
            peak=run.peak(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """The times and the memory of one device's steps, without the first ones."""

    rank: str
    devices: int
    on: str  # the network
    times: tuple[float, ...]
    peak: PeakMemory

    def report(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "devices": self.devices,
            "on": self.on,
            "step_s": median(self.times),
            "planned_bytes": self.peak.planned,
            "predicted_bytes": self.peak.predicted,
            "measured_bytes": self.peak.measured,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.rank} of {self.devices}, on {self.on}: "
            f"{median(self.times) * 1e3:.1f} ms a step (median of {len(self.times)})",
            f"  memory: {size(self.peak.planned)} planned, "
            f"{size(self.peak.predicted)} with streams side by side",
        ]
        if self.peak.measured is not None:
            off = self.peak.measured / self.peak.predicted - 1
            lines.append(f"  measured: {size(self.peak.measured)} at the peak ({off:+.1%})")
        return "\n".join(lines) + "\n"
