"""What happens to the workers of a run, and what recovery knows of failures, checkpoints and steps' times."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Literal

from torch import Tensor

from piper.checkpoint.folder import candidates
from piper.checkpoint.metadata import read_record
from piper.data.feed import Feed
from piper.errors import ConfigError, LaunchError, WorkerError
from piper.ir.devices import show
from piper.job import Job
from piper.plan.plan import Plans
from piper.runtime.worker import Sums
from piper.workers.results import Resumed
from piper.workers.timeouts import TIMEOUTS

STRAGGLES, IN_A_ROW = 1.3, 20  # times the median of the others, for so many steps: a straggler
WINDOW, OFTEN = 50, 10  # steps that are looked at, and after how many that ran twice it is said
TIMED, TIMES = 5, 50  # steps whose times are known before a stall is judged by them, and are held at most
STALLED = 10.0  # times the median step that any one wait may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run's workers.

    failure: a worker was lost, and the step ended. recovery: all workers run again. mismatch: a repeated step
    gave another result than before. resize: the run goes on with another number of devices. warm: the agent
    of a spare can start a worker at once. skipped: a spare could not be used.
    """

    event: Literal["failure", "recovery", "mismatch", "straggler", "preemption", "resize", "warm", "skipped"]
    step: int
    device: int | None = None
    who: str | None = None
    what: str | None = None
    instruction: str | None = None
    version: int | None = None  # the step whose state was taken
    source: str | None = None  # where it was taken from
    replayed: int | None = None  # steps that were repeated
    seconds: float | None = None  # from the failure, once it had a name; of an agent, since it was started
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each
    left: int | None = None  # retries


Notify = Callable[[Event], None]


def failure_event(error: WorkerError | LaunchError, step: int, left: int) -> Event:
    """Return the event of a failure."""
    return Event(
        event="failure",
        step=step,
        device=error.device if isinstance(error, WorkerError) else None,
        who=error.by,
        what=error.what,
        instruction=error.facts.get("at"),
        left=left,
    )


class Stragglers:
    """Compares the busy times of devices that share a program."""

    def __init__(self, plans: Plans) -> None:
        self.groups = [plan.devices for plan in plans if len(plan.devices) > 1]
        self.slow: dict[int, int] = {}  # steps in a row that a device was slow

    def note(self, step: int, busy: Mapping[int, float]) -> list[Event]:
        """Note the busy times of a step. Return an event for each device that has just become a straggler."""
        events: list[Event] = []
        for group in self.groups:
            ordered = sorted(busy[device] for device in group if device in busy)
            for device in group:
                usual = median_without(busy[device], ordered) if device in busy and len(ordered) > 1 else 0.0
                slow = usual > 0 and busy[device] > STRAGGLES * usual
                self.slow[device] = self.slow.get(device, 0) + 1 if slow else 0
                if self.slow[device] == IN_A_ROW:
                    others_are = f"times as busy as the median of devices {show(group)}"
                    what = f"{busy[device] / usual:.1f} {others_are}, and slow for {IN_A_ROW} steps"
                    who = f"device {device}"
                    events.append(Event(event="straggler", step=step, device=device, who=who, what=what))
        return events


def median_without(value: float, ordered: Sequence[float]) -> float:
    """Return the median of sorted numbers without one of them: to sort the others for each takes too long."""
    place, count = bisect_left(ordered, value), len(ordered) - 1
    low, high = (middle + (middle >= place) for middle in ((count - 1) // 2, count // 2))
    return median((ordered[low], ordered[high]))


class Repeats:
    """Counts steps that were run again because rows exceeded their blocks."""

    def __init__(self) -> None:
        self.last: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # the fullest block of each step
        self.said = False

    def note(self, answers: Iterable[Sums]) -> str | None:
        """Note a step. Return one line, once, when more than a fifth of the last steps were run again."""
        self.last.append(max(sums.fullest for sums in answers))
        again = [fullest for fullest in self.last if fullest[0]]
        if self.said or len(again) <= OFTEN:
            return None
        self.said = True
        needs, room = max(again)
        steps = f"{len(again)} of the last {len(self.last)} steps, which ran twice"
        need = f"these steps need capacity={math.ceil(100 * needs) / 100:g}"
        return f"Rows exceeded their blocks in {steps}: blocks have room for capacity={room:.3g}, and {need}"


class Disk:
    """The checkpoints of a run, in a folder that all machines see."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job

    def past(self, last: int) -> Sequence[Path]:
        """Return those up to a step that are complete, the newest first."""
        complete = [path for path in candidates(self.folder) if isinstance(path, Path)]
        return [path for path in complete if read_record(path).step <= last]

    def batches(self, resumed: Resumed) -> Iterator[Mapping[str, Tensor]]:
        """Return the batches that follow a checkpoint."""
        feed = Feed(self.job.data, self.job.seed)
        feed.seek(resumed.step, resumed.data)
        return feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save that may not be complete."""

    step: int
    path: Path
    data: object
    keep: int | None


def repeatable(error: WorkerError | LaunchError, step: int) -> tuple[object, ...] | None:
    """Return a failure in a form that can be compared. None: a second one would not be the same."""
    if not isinstance(error, WorkerError) or (error.place is None and error.kind != "error"):
        return None  # a process that was killed at no instruction was not killed by what it did
    # Devices that run the same program raise the same error, and any may be the first.
    device = None if error.kind == "error" else error.device
    return step, device, error.what, error.place


class Phases(dict[str, float]):
    """The seconds that each phase of a recovery has taken so far."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time inside the block as one of a phase."""
        began = monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + monotonic() - began

    def part(self, whole: str, name: str, seconds: float) -> None:
        """Count some seconds of a phase as one of another phase, if there are any."""
        if seconds:
            self[whole] -= seconds
            self[name] = self.get(name, 0.0) + seconds


class StepTimes:
    """The seconds that steps take, for each shape of batches: those of long sequences take longer."""

    def __init__(self) -> None:
        self.shape: object = None
        self.known: dict[object, deque[float]] = {}

    def begin(self, batch: object) -> None:
        """Note the batch of the next step."""
        fields = batch.items() if isinstance(batch, Mapping) else ()
        self.shape = tuple((name, getattr(field, "shape", None)) for name, field in fields)

    def add(self, seconds: float) -> None:
        """Note how long a step took."""
        self.known.setdefault(self.shape, deque(maxlen=TIMES)).append(seconds)

    def stall(self, most: float) -> float:
        """Return the seconds without progress after which a step like this has stalled, `most` at most."""
        times = self.known.get(self.shape, ())
        return most if len(times) < TIMED else min(most, max(TIMEOUTS.least_stall, STALLED * median(times)))


def first_intact(read: Callable[[Path], Resumed], past: Sequence[Path]) -> tuple[Path, Resumed]:
    """Return the first of some checkpoints that can be read, and what it holds."""
    for path in past[:-1]:
        with suppress(ConfigError):
            return path, read(path)
    return past[-1], read(past[-1])
