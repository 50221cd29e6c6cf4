"""Checkpoints of a run: where they are, when they are saved, and how to resume from the newest."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from piper.checkpoint.folder import by_step, candidates, step_path
from piper.checkpoint.metadata import DamagedError, read_record
from piper.checkpoint.target import UndroppedError, UnwrittenError, unwritten
from piper.data.feed import Feed
from piper.errors import ConfigError
from piper.job import Job
from piper.recovery.retrying import Disk
from piper.train.loop import SavePolicy


class ResumePoint(Protocol):
    """The step and the data state of a checkpoint."""

    @property
    def step(self) -> int: ...
    @property
    def data(self) -> object: ...


class Saved(Protocol):
    """A running job that can be saved and loaded."""

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None: ...
    def load(self, path: Path | str) -> ResumePoint: ...
    def settle(self) -> None: ...


def checkpoints_of(folder: Path, job: Job) -> Path | None:
    """Return the folder of a run's checkpoints; a relative one is in the run's own. None: it saves none."""
    return None if job.checkpoint is None else folder / job.checkpoint.folder


def prepare_saves(folder: Path, job: Job, resume: bool) -> Path | None:
    """Make the folder of a run's checkpoints and return it; refuse one that holds another run's."""
    where = checkpoints_of(folder, job)
    if where is None:
        return None
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(where, str(error)) from None
    if not resume and (earlier := by_step(where)):
        raise ConfigError(
            "this folder holds the checkpoints of another run",
            by=str(where),
            facts={"newest": earlier[-1].name},
            hint="add --resume to go on with it, or let the job save elsewhere: Checkpoint(folder=...)",
        )
    return where


def saves_of(
    run: Saved,
    folder: Path,
    job: Job,
    feed: Feed,
    warn: Callable[[str], None],
    saved: Callable[[int, Path], None] = lambda step, path: None,
) -> SavePolicy | None:
    """Return how to save. None: the job asks for no saves.

    saved: is called with the step and the folder of each checkpoint.
    A save that fails is a warning, except at the end of the run.
    """
    where, wanted = checkpoints_of(folder, job), job.checkpoint
    if where is None or wanted is None:
        return None

    def save(step: int, last: bool) -> None:
        try:
            run.settle()  # the save before this one, which was left to finish by itself
        except (UnwrittenError, UndroppedError) as error:
            warn(f"warning: {error}")
        try:
            run.save(step_path(where, step), data=feed.state_dict(), wait=last, keep=wanted.keep)
            saved(step, step_path(where, step))
        except UndroppedError as error:
            warn(f"warning: {error}")
        except UnwrittenError as error:
            if last:
                raise
            warn(f"warning: {error}")

    return SavePolicy(every=wanted.every, save=save)


def past_of(folder: Path, job: Job) -> list[Path | DamagedError]:
    """Return the checkpoints that a run may go on from, the newest first, or what is wrong with one."""
    where = checkpoints_of(folder, job)
    if where is None:
        raise ConfigError(
            "the job saves no checkpoints, so there is nothing to go on from",
            by="--resume",
            hint='let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))',
        )
    found = candidates(where)
    if found and not any(isinstance(one, Path) for one in found):
        raise none_left(where, [one for one in found if isinstance(one, DamagedError)])
    return found


def disk_of(folder: Path, job: Job) -> Disk | None:
    """Return how a run goes on from its checkpoints where its memory is lost. None: it saves none."""
    where = checkpoints_of(folder, job)
    if where is None:
        return None

    def past(last: int) -> list[Path]:
        found = [path for path in candidates(where) if isinstance(path, Path)]
        return [path for path in found if read_record(path).step <= last]

    def batches(found: ResumePoint) -> Feed:
        feed = Feed(job.data, job.seed)
        seek(feed, found)
        return feed

    return Disk(folder=where, past=past, batches=batches)


def none_left(where: Path, damaged: Sequence[DamagedError]) -> ConfigError:
    """Return the error of a run none of whose checkpoints can be loaded."""
    return ConfigError(
        "no checkpoint of this run can be loaded",
        by="--resume",
        facts={"folder": str(where), **{error.path.name: error.why for error in damaged}},
        hint="bring one back from a copy, or start a run of its own with another --out",
    )


def go_on(
    run: Saved, past: Sequence[Path | DamagedError], feed: Feed, say: Callable[[str], None]
) -> tuple[Path, int]:
    """Take up the newest checkpoint that is intact, and let the data go on from there.

    Return the checkpoint and how many steps it has seen. Say which newer ones are damaged.
    """
    damaged: list[DamagedError] = []
    for one in past:
        if isinstance(one, DamagedError):
            damaged.append(one)
            continue
        try:
            found = run.load(one)
        except DamagedError as error:
            damaged.append(error)
            continue
        for bad in damaged:
            say(f"{bad.path} is damaged ({bad.why}): using {one} instead")
        seek(feed, found)
        return one, found.step
    raise none_left(damaged[0].path.parent, damaged)


def seek(feed: Feed, found: ResumePoint) -> None:
    """Move the data to where a checkpoint was saved."""
    feed.seek(found.step, found.data if isinstance(found.data, Mapping) else None)
