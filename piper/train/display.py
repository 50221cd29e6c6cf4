"""The display of a run: live on a terminal, else plain lines."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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

from piper.ir.format import size
from piper.train.measure import Measure, Reporter

LEVELS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of the curve
LINES = 20  # of a whole run, where there is no terminal
QUIET = 10.0  # seconds after which a plain line comes anyway


class ConsoleLog(logging.Handler):
    """Prints what the package logs, such as that a program is compiled for another shape of batches."""

    def __init__(self, console: Console, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.console, self.log = console, logging.getLogger("piper")

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
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
