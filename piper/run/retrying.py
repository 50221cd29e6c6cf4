"""What recovery knows of failures, of saves under way, of checkpoints, and of how long steps take."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

from torch import Tensor

from piper.checkpoint.folder import candidates
from piper.checkpoint.metadata import read_record
from piper.data.feed import Feed
from piper.errors import ConfigError, LaunchError, WorkerError
from piper.job import Job
from piper.run.checkpointing import checkpoints_of
from piper.workers.results import Resumed
from piper.workers.timeouts import TIMEOUTS

STEPS = 5  # steps whose times are known before a stall is judged by them
SLOWER = 10.0  # times the median step that any one wait may take
KEPT = 50  # steps whose times are held


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The checkpoints of a run."""

    folder: Path  # that all machines see
    past: Callable[[int], Sequence[Path]]  # those up to a step that are complete, the newest first
    batches: Callable[[Resumed], Iterator[Mapping[str, Tensor]]]  # those that follow a checkpoint


def disk_of(folder: Path, job: Job) -> Disk | None:
    """Return how a run goes on from its checkpoints where its memory is lost. None: it saves none."""
    where = checkpoints_of(folder, job)
    if where is None:
        return None

    def past(last: int) -> list[Path]:
        complete = [path for path in candidates(where) if isinstance(path, Path)]
        return [path for path in complete if read_record(path).step <= last]

    def batches(resumed: Resumed) -> Feed:
        feed = Feed(job.data, job.seed)
        feed.seek(resumed.step, resumed.data)
        return feed

    return Disk(folder=where, past=past, batches=batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A save that may not be complete."""

    step: int
    path: Path
    data: object
    keep: int | None


def repeatable(error: WorkerError | LaunchError, step: int) -> tuple[object, ...] | None:
    """Return a failure in a form that can be compared. None: a second one would not be the same.

    A process that was killed or stopped at no instruction, because it had just started for example, was not
    killed by what it did. Devices that run the same program raise the same error, and any may be the first.
    """
    if not isinstance(error, WorkerError) or (error.place is None and error.kind != "error"):
        return None
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

    def begin(self, batch: object) -> bool:
        """Note the batch of the next step. Return whether its shape is another than that of the last one."""
        before, fields = self.shape, batch.items() if isinstance(batch, Mapping) else ()
        self.shape = tuple((name, getattr(field, "shape", None)) for name, field in fields)
        return before is not None and before != self.shape

    def add(self, seconds: float) -> None:
        """Note how long a step took."""
        self.known.setdefault(self.shape, deque(maxlen=KEPT)).append(seconds)

    def stall(self, most: float) -> float:
        """Return the seconds without progress after which a step like this has stalled, `most` at most."""
        times = self.known.get(self.shape, ())
        return most if len(times) < STEPS else min(most, max(TIMEOUTS.least_stall, SLOWER * median(times)))


def first_intact(read: Callable[[Path], Resumed], past: Sequence[Path]) -> tuple[Path, Resumed]:
    """Return the first of some checkpoints that can be read, and what it holds."""
    for path in past[:-1]:
        with suppress(ConfigError):
            return path, read(path)
    return past[-1], read(past[-1])
