"""Folders that appear complete or not at all: a kill at any moment leaves the last complete one loadable.

[Note: names] A checkpoint `step-00000012` is written as `.step-00000012.partial` next to it, and renamed when
all of it is on the disk. One that it replaces waits as `.step-00000012.old` for the moment between two
renames, and one that is dropped becomes `.step-00000012.trash` before its files go. Nothing with a dot in
front counts, but for an `.old` whose successor never came. One whose record is damaged and whose name is
needed is set aside as `step-00000012.damaged`: it is never deleted.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from piper.checkpoint.metadata import FILE, DamagedError, Record, read_record
from piper.checkpoint.storage import StorageError, Written, index_of, sync, verified_block
from piper.checkpoint.target import (
    STEP,
    UndroppedError,
    check_taken,
    damaged,
    entries,
    remove,
    strangers,
    target_of,
    unwritten,
)
from piper.errors import ConfigError

LEFT = re.compile(r"\.step-(\d+)\.(partial|trash|old)")
Signature = tuple[tuple[str, int, int, int], ...]  # of each file: its name, number, bytes and time of change


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08}"


def hidden_path(path: Path, what: str) -> Path:
    """Return a hidden path next to a checkpoint, see [Note: names]."""
    return path.with_name(f".{path.name}.{what}")


def begin(path: Path) -> Path:
    """Return an empty folder to write a checkpoint into. Remove what an interrupted save left there."""
    partial = hidden_path(target_of(path), "partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        partial.mkdir()
    except OSError as error:
        raise unwritten(path, str(error)) from error
    return partial


@contextmanager
def discarding(path: Path) -> Iterator[None]:
    """Discard the checkpoint that was begun if the block fails."""
    try:
        yield
    except (StorageError, SafetensorError, OSError) as error:
        discard(path)
        raise unwritten(path, str(error)) from error
    except ConfigError:
        discard(path)
        raise


@contextmanager
def begun(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write a checkpoint into. It is discarded if that fails inside the block."""
    partial = begin(path)
    with discarding(path):
        yield partial


def commit(path: Path, record: Record, written: Sequence[Written] = ()) -> None:
    """Move the checkpoint that was begun, now complete, into its place; `written`: files for its record."""
    if written:
        files = {name: file for one in written for name, file in one.files.items()}
        record = replace(record, tensors=index_of(one.placed for one in written), files=files)
    text = hidden_path(path, "partial") / FILE
    with discarding(path):
        text.write_text(record.to_json(), encoding="utf-8")
        sync(text)
        take_place(path)


def take_place(path: Path) -> None:
    """Move the folder that was begun into its place, and drop the checkpoint that was there."""
    partial, old = hidden_path(path, "partial"), hidden_path(path, "old")
    sync(partial)
    check_taken(path)  # again: a save may take long
    if path.is_dir() and damaged(path):
        names = (path.with_name(f"{path.name}.damaged{f'-{n}' if n > 1 else ''}") for n in count(1))
        path.rename(next(name for name in names if not os.path.lexists(name)))
    elif path.is_dir() and entries(path):
        remove(old)
        path.rename(old)
    partial.rename(path)  # which replaces an empty folder
    sync(path.parent)
    with suppress(OSError):  # the new one is in its place; what is left is cleared away by the next save
        remove(old)


def discard(path: Path) -> None:
    """Remove a checkpoint that was begun, and put the one it was to replace back in its place."""
    with suppress(OSError):  # the error that led here is the one to report
        remove(hidden_path(path, "partial"))
    place = settled(path)
    if place != path and not path.exists():
        place.rename(path)


def settled(path: Path) -> Path:
    """Return the path of a complete checkpoint: its place, or where a save that was killed set it aside."""
    old = hidden_path(path, "old")
    return old if not (path / FILE).exists() and (old / FILE).exists() else path


def by_step(folder: Path) -> list[Path]:
    """Return the paths named like checkpoints in a folder, the oldest first, intact or not."""
    names: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(path.name) or LEFT.fullmatch(path.name)
        if match is None or match.group(0).endswith((".partial", ".trash")):
            continue
        names[int(match[1])] = settled(path.with_name(path.name.removeprefix(".").removesuffix(".old")))
    return [path for _, path in sorted(names.items())]


def whole(path: Path) -> bool:
    """Return whether all files of a checkpoint are there. Its tensors are not read."""
    return succeeds(read_record, path)


def verify(path: Path) -> Record:
    """Read and verify every byte of a checkpoint, and return its record."""
    record = read_record(path)
    try:
        for name, file in record.files.items():
            for number in range(-(-file.size // record.block)):
                verified_block(path, record, name, number)
    except StorageError as error:
        raise DamagedError(path, str(error)) from error
    return record


def intact(path: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    return succeeds(verify, path)


def succeeds(check: Callable[[Path], object], path: Path) -> bool:
    """Return whether a check of a checkpoint raises no error."""
    try:
        check(path)
    except ConfigError:
        return False
    return True


def latest(folder: Path | str) -> Path | None:
    """Return the newest intact checkpoint in a folder. Reads all of it. None: there is none."""
    return next((path for path in reversed(by_step(Path(folder))) if intact(path)), None)


def candidates(folder: Path) -> list[Path | DamagedError]:
    """Return the checkpoints of a folder by their records, newest first; of a damaged one, the reason."""
    checkpoints: list[Path | DamagedError] = []
    for path in reversed(by_step(folder)):
        try:
            read_record(path)
            checkpoints.append(path)
        except DamagedError as error:
            checkpoints.append(error)
        except ConfigError:
            if path.is_dir() and entries(path):
                checkpoints.append(DamagedError(path, f"{FILE} is missing"))
    return checkpoints


def retain(folder: Path, keep: int, good: Callable[[Path], bool] = intact) -> None:
    """Drop all that is older than the newest `keep` good checkpoints, and what interrupted saves have left.

    One that is damaged does not count, and one to which the user has added a file is not dropped.
    """
    assert keep >= 1
    checkpoints = [path for path in by_step(folder) if whole(path)]
    place, kept = len(checkpoints), 0
    while place and kept < keep:
        place -= 1
        kept += good(checkpoints[place])
    for path in checkpoints[: place if kept == keep else 0]:
        if not strangers(path):
            drop(path, checkpoints[-1])
    for path in folder.iterdir():
        match = LEFT.fullmatch(path.name)
        if match is not None and path not in checkpoints:
            with suppress(OSError):  # the next save tries again
                remove(path)


def drop(path: Path, newest: Path) -> None:
    """Remove an old checkpoint: at once for every reader, then file by file."""
    trash = hidden_path(path.with_name(path.name.removeprefix(".").removesuffix(".old")), "trash")
    try:
        remove(trash)
        path.rename(trash)
        remove(trash)
    except OSError as error:
        raise UndroppedError(
            "an old checkpoint could not be dropped",
            by="save",
            facts={"path": str(path), "why": str(error), "newest": str(newest)},
            hint="the newest is complete; see who may write to this folder",
        ) from error


class Retention:
    """Keeps the newest intact checkpoints of a folder, in a thread. It reads those this process did not."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[Signature, bool]] = {}
        self.thread: threading.Thread | None = None
        self.error: ConfigError | None = None

    def trust(self, path: Path) -> None:
        """Note that a checkpoint is intact as it is now."""
        self.known[path] = (signature_of(path), True)

    def good(self, path: Path) -> bool:
        """Return whether a checkpoint is intact. Read it once, and again only when its files change."""
        now = signature_of(path)
        if path not in self.known or self.known[path][0] != now:
            self.known[path] = (now, intact(path))
        return self.known[path][1]

    def start(self, folder: Path, keep: int) -> None:
        """Begin to drop all but the newest `keep` good checkpoints of a folder."""
        assert self.thread is None, "one at a time"

        def work() -> None:
            try:
                retain(folder, keep, self.good)
            except ConfigError as error:
                self.error = error
            except OSError as error:
                self.error = UndroppedError(
                    "old checkpoints could not be looked at",
                    by="save",
                    facts={"path": str(folder), "why": str(error)},
                    hint="the newest is complete; see who may read this folder",
                )
            self.known = {path: known for path, known in self.known.items() if path.exists()}

        self.thread = threading.Thread(target=work, name="retention", daemon=True)
        self.thread.start()

    def finish(self) -> ConfigError | None:
        """Wait until old checkpoints are dropped. Return the error if that failed. None: it did not."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        return error


def signature_of(path: Path) -> Signature:
    """Return the signature of a checkpoint's files. It changes when a file is written to."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return ()  # it is gone: nothing is known of it
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found))
