"""Checkpoints of a run: where they lie, when they are made, and going on from the newest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from piper.checkpoint.folder import latest, step_path
from piper.data.feed import Feed
from piper.errors import ConfigError
from piper.job import Job
from piper.train.loop import Saves


class Resumed(Protocol):
    """What a checkpoint says of where it was made."""

    @property
    def step(self) -> int: ...
    @property
    def data(self) -> object: ...


class Saved(Protocol):
    """A running job that can be saved and loaded."""

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None: ...
    def load(self, path: Path | str) -> Resumed: ...


def checkpoints_of(folder: Path, job: Job) -> Path | None:
    """Where a run's checkpoints lie: a relative folder of the job is inside the run's own."""
    return None if job.checkpoint is None else folder / job.checkpoint.folder


def saves_of(run: Saved, folder: Path, job: Job, feed: Feed) -> Saves | None:
    """How to save, if the job asks for it."""
    where, wanted = checkpoints_of(folder, job), job.checkpoint
    if where is None or wanted is None:
        return None

    def save(step: int, last: bool) -> None:
        run.save(step_path(where, step), data=feed.state_dict(), wait=last, keep=wanted.keep)

    return Saves(every=wanted.every, save=save)


def newest(folder: Path, job: Job) -> Path | None:
    """The checkpoint that a run goes on from; none, if none is complete yet."""
    where = checkpoints_of(folder, job)
    if where is None:
        raise ConfigError(
            "the job saves no checkpoints, so there is nothing to go on from",
            by="--resume",
            hint='let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))',
        )
    return latest(where)


def go_on(run: Saved, path: Path, feed: Feed) -> int:
    """Take up a checkpoint, and let the data go on from there; how many steps it has seen."""
    found = run.load(path)
    feed.seek(found.step, found.data if isinstance(found.data, Mapping) else None)
    return found.step
