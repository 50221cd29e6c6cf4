"""Where the checkpoints of a run are, which one it goes on from, and the states of callbacks in them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from piper.callbacks import Callback, named_callbacks
from piper.checkpoint.folder import by_step, candidates, settled
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.target import unwritten
from piper.errors import ConfigError
from piper.job import Job
from piper.workers.results import Resumed

log = logging.getLogger("piper")


def checkpoints_of(folder: Path, job: Job) -> Path | None:
    """Return the folder of a run's checkpoints; a relative one is in the run's own. None: it saves none."""
    return None if job.checkpoint is None else folder / job.checkpoint.folder


def prepare_saves(folder: Path, job: Job, own: Callable[[Path], bool]) -> Path | None:
    """Make the folder of a run's checkpoints and return it; refuse one that holds another run's.

    own: whether the run has written a checkpoint, or goes on from it or from a later one.
    """
    where = checkpoints_of(folder, job)
    if where is None:
        return None
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(where, str(error)) from None
    if earlier := [path for path in by_step(where) if not own(path)]:
        raise ConfigError(
            "this folder holds the checkpoints of another run",
            by=str(where),
            facts={"newest": earlier[-1].name},
            hint="go on with it: --resume, or piper.launch(program, resume=...); "
            "or let the job save elsewhere: Checkpoint(folder=...)",
        )
    return where


def past_of(folder: Path, job: Job) -> list[Path | DamagedError]:
    """Return the checkpoints that a run may go on from, the newest first, or what is wrong with one."""
    where = checkpoints_of(folder, job)
    if where is None:
        raise ConfigError(
            "the job saves no checkpoints, so there is nothing to go on from",
            by="--resume",
            hint='let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))',
        )
    return loadable(where)


def loadable(where: Path) -> list[Path | DamagedError]:
    """Return the checkpoints of a folder, the newest first, or what is wrong with one. Refuse if all are."""
    checkpoints = candidates(where)
    if checkpoints and not any(isinstance(one, Path) for one in checkpoints):
        raise none_left(where, [one for one in checkpoints if isinstance(one, DamagedError)])
    return checkpoints


def checkpoints_at(path: Path, job: Job) -> list[Path | DamagedError]:
    """Return the checkpoints that a path names, the newest first.

    It is a checkpoint, a folder of checkpoints, or the folder of a run, which may have none yet.
    """
    inside = checkpoints_of(path, job)
    for where in (path,) if inside is None else (inside, path):
        if by_step(where):
            return loadable(where)
    begun = inside is not None and inside.is_dir() and settled(path) == path
    return [] if begun else [path]


def none_left(where: Path, damaged: Sequence[DamagedError]) -> ConfigError:
    """Return the error of a run none of whose checkpoints can be loaded."""
    return ConfigError(
        "no checkpoint of this run can be loaded",
        by="--resume",
        facts={"folder": str(where), **{error.path.name: error.why for error in damaged}},
        hint="bring one back from a copy, or start a run of its own with another --out",
    )


def load_newest(read: Callable[[Path], Resumed], past: Sequence[Path | DamagedError]) -> Resumed:
    """Load the newest checkpoint that is intact. Say which newer ones are damaged."""
    damaged: list[DamagedError] = []
    for one in past:
        if isinstance(one, DamagedError):
            damaged.append(one)
            continue
        try:
            resumed = read(one)
        except DamagedError as error:
            damaged.append(error)
            continue
        for bad in damaged:
            log.warning("%s is damaged (%s): using %s instead", bad.path, bad.why, one)
        return replace(resumed, path=str(one))
    raise none_left(damaged[0].path.parent, damaged)


def run_folder(checkpoint: Path, job: Job) -> Path | None:
    """Return the folder of the run that wrote a checkpoint. None: the job would not have written it there."""
    parts = () if job.checkpoint is None else Path(job.checkpoint.folder).parts
    where = checkpoint.parent.absolute()
    if not parts or Path(*parts).is_absolute() or where.parts[-len(parts) :] != parts:
        return None
    return Path(*where.parts[: -len(parts)])


CALLBACKS, DATA = "piper callbacks", "data"  # keys of the data of a checkpoint that has both


def with_states(callbacks: Sequence[Callback], data: object) -> object:
    """Return the data of a checkpoint, with the states of those callbacks that have any."""
    states = {name: callback.state_dict() for name, callback in named_callbacks(callbacks).items()}
    kept = {name: state for name, state in states.items() if state}
    return {CALLBACKS: kept, DATA: data} if kept else data


def split_states(data: object) -> tuple[object, Mapping[str, object]]:
    """Return the data of a checkpoint, and the states of callbacks by their names."""
    if isinstance(data, Mapping) and CALLBACKS in data:
        return data[DATA], cast("Mapping[str, object]", data[CALLBACKS])
    return data, {}
