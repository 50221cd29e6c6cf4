"""Folders that appear complete or not at all: a kill at any moment leaves the last complete one loadable.

[Note: names] A checkpoint `step-00000012` is written as `.step-00000012.partial` beside it, and renamed when
all of it is on the disk. One that it replaces waits as `.step-00000012.old` for the moment between two
renames, and one that is dropped becomes `.step-00000012.trash` before its files go. Nothing with a dot in
front counts, but for an `.old` whose successor never came.
"""

import re
import shutil
from pathlib import Path

from piper.checkpoint.record import FILE, Record, read_record
from piper.checkpoint.storage import sync
from piper.errors import ConfigError

STEP = re.compile(r"step-(\d+)")
LEFT = re.compile(r"\.step-(\d+)\.(partial|trash|old)")


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08}"


def beside(path: Path, what: str) -> Path:
    """A name next to a checkpoint, see [Note: names]."""
    return path.with_name(f".{path.name}.{what}")


def begin(path: Path) -> Path:
    """An empty folder to write a checkpoint into, whatever an interrupted save has left there."""
    partial = beside(path, "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise unwritten(path, str(error)) from error
    return partial


def commit(path: Path, record: Record) -> None:
    """Let the checkpoint that was begun take its place, complete."""
    written = beside(path, "partial") / FILE
    try:
        written.write_text(record.to_json(), encoding="utf-8")
        sync(written)
        take_place(path)
    except OSError as error:
        discard(path)
        raise unwritten(path, str(error)) from error


def take_place(path: Path) -> None:
    """Put the folder that was begun in its place, and drop the one that was there."""
    partial, old = beside(path, "partial"), beside(path, "old")
    sync(partial)
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        path.rename(old)
    partial.rename(path)
    sync(path.parent)
    if old.exists():
        shutil.rmtree(old)


def discard(path: Path) -> None:
    """Forget a checkpoint that was begun; one that it was to replace is back in its place."""
    shutil.rmtree(beside(path, "partial"), ignore_errors=True)
    found = settled(path)
    if found != path and not path.exists():
        found.rename(path)


def unwritten(path: Path, why: str) -> ConfigError:
    """The error of a save that came to nothing."""
    return ConfigError(
        "the checkpoint could not be written",
        by="save",
        facts={"path": str(path), "why": why, "earlier": "every checkpoint that was complete still is"},
        hint="make room or choose another folder, then save again; training can go on",
    )


def settled(path: Path) -> Path:
    """Where the complete checkpoint of a name is: in its place, or set aside by a save that was killed."""
    old = beside(path, "old")
    return old if not (path / FILE).exists() and (old / FILE).exists() else path


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder that can be loaded, the oldest first."""
    names: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(path.name) or LEFT.fullmatch(path.name)
        if match is None or match.group(0).endswith((".partial", ".trash")):
            continue
        names[int(match[1])] = settled(path.with_name(path.name.removeprefix(".").removesuffix(".old")))
    return [path for _, path in sorted(names.items()) if whole(path)]


def whole(path: Path) -> bool:
    """Whether all of a checkpoint is there."""
    try:
        read_record(path)
    except ConfigError:
        return False
    return True


def latest(folder: Path | str) -> Path | None:
    """The newest checkpoint in a folder that can be loaded, if there is one."""
    return next(reversed(complete(Path(folder))), None)


def retain(folder: Path, keep: int) -> None:
    """Drop all but the newest complete checkpoints, and what interrupted saves have left."""
    assert keep >= 1
    found = complete(folder)
    for path in found[:-keep]:
        trash = beside(path, "trash")
        shutil.rmtree(trash, ignore_errors=True)
        try:
            path.rename(trash)
        except OSError as error:
            raise ConfigError(
                "an old checkpoint could not be dropped",
                by="save",
                facts={"path": str(path), "why": str(error), "newest": str(found[-1])},
                hint="the newest is complete; see who may write to this folder",
            ) from error
    for path in folder.iterdir():
        match = LEFT.fullmatch(path.name)
        if match is not None and path not in found[-keep:]:
            shutil.rmtree(path, ignore_errors=True)
