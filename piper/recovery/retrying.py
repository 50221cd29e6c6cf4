"""What recovery knows of failures, of saves under way and of checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from piper.errors import LaunchError, WorkerError
from piper.launchers.base import Resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The checkpoints of a run."""

    newest: Callable[[], Path | None]  # the newest that is complete
    batches: Callable[[Resumed], Iterator[Mapping[str, Tensor]]]  # those that follow a checkpoint


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
