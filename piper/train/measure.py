"""What a run measures and shows: its steps, learning rates, profile and outcome, live or as plain lines."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import Tensor

from piper.checkpoint.json_state import decode
from piper.checkpoint.metadata import Trainer
from piper.compiler import Program
from piper.ir.format import size
from piper.job import Job
from piper.run.run import Run
from piper.runtime.recorders import WARM, ClockOffset, DeviceProfile
from piper.runtime.trainers import Sizes, advance, empty_optimizer, make_scheduler
from piper.simulate.profile import FOLDER, Profile, Track, fingerprint, works_of, write_profile
from piper.simulate.simulate import TOKENS
from piper.view.plan_trace import profile_trace
from piper.view.provenance import FILE, METRICS

LEVELS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of the curve
LINES = 20  # of a whole run, where there is no terminal
QUIET = 10.0  # seconds after which a plain line comes anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One step, as `metrics.jsonl` has it. Steps count from 1: step k is the k-th update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float | None  # None: the batch has no tokens
    samples_per_s: float
    step_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the loss returns behind the loss

    def as_line(self) -> dict[str, object]:
        """Return the line of `metrics.jsonl`, which has metrics only where the loss returns some."""
        return {key: value for key, value in asdict(self).items() if key != "metrics" or value}


Reporter = Callable[[Measure], None]


class Rate:
    """The learning rate of each step, from an optimizer like the workers' that has nothing to train."""

    def __init__(self, job: Job, sizes: Sizes, resumed: Trainer | None = None) -> None:
        """Build the schedule, from a resumed state if any; `sizes`: of all parameters that are trained."""
        self._job = job
        self._optimizer = empty_optimizer(job.optimizer, sizes)
        self._scheduler = None
        if self._optimizer is None:
            return
        if job.scheduler is not None:
            self._scheduler = make_scheduler(job.scheduler, self._optimizer)
        if resumed is not None and resumed.optimizer is not None:
            groups = cast("list[dict[str, object]]", decode(resumed.groups))
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(saved)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(cast("dict[str, object]", decode(resumed.schedule)))

    @property
    def now(self) -> float:
        """Return the learning rate of the next step, of the first group of parameters."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    def set_option(self, group: int, key: str, value: float) -> None:
        """Set an option of a group, as `run.optimizer[group][key] = value` does on the workers."""
        if self._optimizer is not None:
            self._optimizer.param_groups[group][key] = value

    def advance(self, step: int) -> None:
        """Go on by a step, as workers do at its end."""
        if self._scheduler is not None and self._job.scheduler is not None:
            advance(self._scheduler, self._job.scheduler, step)


def tokens_in(batch: Mapping[str, Tensor]) -> int | None:
    """Count the tokens of a batch. None: it has none."""
    return next((batch[name].numel() for name in TOKENS if name in batch), None)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run, so far or at its end."""

    folder: Path
    done: int
    steps: int
    saved: bool  # the last step is in a checkpoint
    seconds: float = 0.0  # of steps
    first: Measure | None = None  # step of this run, after a resume too. None: there was nothing left to do
    last: Measure | None = None
    preempted: bool = False  # stopped by SIGTERM

    def add(self, measure: Measure) -> None:
        self.done = measure.step
        self.first, self.last = self.first or measure, measure
        self.seconds += measure.step_s

    @property
    def stopped(self) -> bool:
        """Return whether the run was stopped before its last step."""
        return self.done < self.steps


def ending(outcome: Outcome, program: str = "piper") -> str:
    """Return the closing message of a run that reached its last step. program: how the user calls Piper."""
    folder, first, last = outcome.folder, outcome.first, outcome.last
    if first is None or last is None:
        return f"The run is at step {outcome.done} already: --steps asks for more"
    fall = 100 * (1 - last.loss / first.loss) if first.loss else 0.0
    return (
        f"Trained {last.step - first.step + 1} steps in {outcome.seconds:.0f} s: "
        f"loss {first.loss:.4f} -> {last.loss:.4f} ({abs(fall):.0f} % {'lower' if fall >= 0 else 'higher'})\n"
        f"  run      {folder}\n"
        f"  metrics  {folder / METRICS}\n"
        f"  plan     {folder / 'plan.txt'}\n"
        f"  look     {program} view {folder}"
    )


def stopping(outcome: Outcome, again: str) -> str:
    """Return the message of a run that was stopped; `again`: the command that goes on."""
    where = f"{'preempted' if outcome.preempted else 'stopped'} after step {outcome.done} of {outcome.steps}"
    unsaved = "nothing was saved, because the job has no checkpoint"
    return f"{where}; " + (f"go on with: {again}" if outcome.saved else unsaved)


def profile_of(run: Run, program: Program, recipe: str, on: str, done: int = 0) -> Profile:
    """Return the profile that a run's workers recorded; `done`: the steps taken before they began."""
    tracks = [track_of(recording, clock) for recording, clock in run.recordings().values()]
    return Profile(
        plans=program.plans,
        tracks=tuple(sorted(tracks, key=lambda track: track.device)),
        model=fingerprint(program.outline),
        recipe=recipe,
        on=on,
        accelerator=program.device,
        first=done + WARM + 1,
        works=works_of(program.outline.chunks),
    )


def track_of(recording: DeviceProfile, clock: ClockOffset) -> Track:
    """Return one device's recording on the driver's clock."""
    steps = tuple(
        tuple((start - clock.offset, end - clock.offset, busy) for start, end, busy in step)
        for step in recording.steps
    )
    return Track(device=recording.device, steps=steps, error=clock.error)


def save_profile(profile: Profile, folder: Path) -> str:
    """Write a run's profile and its trace into its folder, and return a message that says where they are."""
    if not profile.count:
        return f"No step was recorded: the run ended within its first {WARM}"
    write_profile(profile, folder / FOLDER)
    (folder / FOLDER / "trace.json").write_text(profile_trace(profile), encoding="utf-8")
    shutil.copyfile(folder / FILE, folder / FOLDER / FILE)  # a run that goes on may have other plans
    return f"Profile in {folder / FOLDER}: piper profile {folder}"


class ConsoleLog(logging.Handler):
    """Prints what the package logs, such as that a program is compiled for another shape of batches."""

    def __init__(self, console: Console, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.console, self.log = console, logging.getLogger("piper")

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False)

    def __enter__(self) -> None:
        self.log.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self.log.removeHandler(self)


class Stages(ConsoleLog):
    """Shows what is done before the first step: the latest live on a terminal, else lines of the longest."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, logging.DEBUG if console.is_terminal else logging.INFO)
        self.level_before = self.log.level
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", visible=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a stage; print what is more than a stage."""
        if not self.console.is_terminal or record.levelno >= logging.WARNING:
            super().emit(record)
            return
        done: int | None = getattr(record, "done", None)
        if not done:  # a new stage begins
            self.progress.reset(self.task, total=getattr(record, "total", None), visible=True)
        self.progress.update(self.task, description=self.format(record), completed=done or 0)

    def __enter__(self) -> None:
        self.log.setLevel(logging.DEBUG)
        super().__enter__()
        self.progress.start()

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        super().__exit__()
        self.log.setLevel(self.level_before)


@contextmanager
def display(console: Console, done: int, steps: int, peak: int) -> Iterator[Reporter]:
    """Yield a function that shows measures. peak: the planned bytes of the fullest device."""
    if not console.is_terminal:
        yield Lines(console, done, steps)
        return
    counted = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None))
    timed = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    progress = Progress(*counted, *timed, console=console, expand=True)
    task = progress.add_task("train", total=steps, completed=done)
    losses: list[float] = []
    with Live(progress, console=console, refresh_per_second=8) as live:

        def tell(measure: Measure) -> None:
            losses.append(measure.loss)
            progress.update(task, completed=measure.step)
            facts = f"{numbers(measure)}   memory {size(peak)} a device, planned"
            live.update(Group(Text(f"loss  {curve(losses)}", no_wrap=True), Text(facts), progress))

        yield tell


class Lines:
    """Plain lines: the first step, the last, and some between."""

    def __init__(
        self, console: Console, done: int, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.first, self.steps, self.clock = console, done + 1, steps, clock
        self.every = max(1, (steps - done) // LINES)
        self.began = self.shown = clock()

    def __call__(self, measure: Measure) -> None:
        now = self.clock()
        due = measure.step in (self.first, self.steps) or measure.step % self.every == 0
        if not due and now - self.shown < QUIET:
            return
        self.shown = now
        left = (now - self.began) / (measure.step - self.first + 1) * (self.steps - measure.step)
        self.console.print(f"step {measure.step}/{self.steps}   {numbers(measure)}   {left:.0f} s left")


def numbers(measure: Measure) -> str:
    """Format the measures of a step in one line."""
    tokens = measure.tokens_per_s
    speed = f"{measure.samples_per_s:,.0f} samples/s" if tokens is None else f"{tokens:,.0f} tokens/s"
    loss = f"loss {measure.loss:.4f}{shown(measure.metrics)}   grad norm {measure.grad_norm:.3f}"
    return f"{loss}   lr {measure.lr:.2e}   {speed}   {1000 * measure.step_s:.0f} ms/step"


def shown(metrics: Mapping[str, float]) -> str:
    """Format what a loss returns behind the loss, to stand there."""
    return "".join(f"   {name} {value:.4f}" for name, value in metrics.items())


def curve(losses: list[float]) -> str:
    """Draw the losses so far as a row of bars, from the first to the last."""
    step = max(1, len(losses) / WIDTH)
    picked = [losses[int(place * step)] for place in range(min(len(losses), WIDTH))]
    low, high = min(picked), max(picked)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((loss - low) * scale)] for loss in picked)
