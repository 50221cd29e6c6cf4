"""Where a checkpoint or an export may be written: never over anything that Piper did not write.

[Note: ours] A folder is a checkpoint of ours if its record can be read and lists all its files, and an export
of ours if its mark can be read and lists all its files. Such a folder may be replaced. An empty folder may be
used. Everything else stays as it is, and the save is refused. Files are removed one by one, by name.
"""

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from piper.checkpoint.metadata import FILE, OURS, DamagedError, parse
from piper.errors import ConfigError
from piper.ir.format import listed

MARK, EXPORT = "piper-export.json", "piper export"
STEP = re.compile(r"step-(\d+)")


class UnwrittenError(ConfigError):
    """A checkpoint that was not written. Everything that was on the disk before still is."""


class UndroppedError(ConfigError):
    """An old checkpoint that was not dropped. The new one is complete."""


def unwritten(path: Path, why: str) -> UnwrittenError:
    """Return the error for a save that failed."""
    return UnwrittenError(
        "the checkpoint could not be written",
        by="save",
        facts={"path": str(path), "why": why, "earlier": "every checkpoint that was complete still is"},
        hint="make room or choose another folder, then save again; training can go on",
    )


def not_ours(path: str, why: str) -> UnwrittenError:
    """Return the error for a path where a checkpoint or an export must not be written."""
    return UnwrittenError(
        "nothing is written here, because something of yours could be lost",
        by="save",
        facts={"path": path, "why": why},
        hint="name a new folder, or an earlier checkpoint or export that may be replaced",
    )


def target_of(given: Path | str) -> Path:
    """Return where to write, as an absolute path; refuse a place that may hold anything of the user's."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise not_ours(repr(text), "it is not a path")
    path = Path(text)
    try:
        path = path.absolute()
        real = Path(os.path.realpath(path))
        if path.name in ("", ".", ".."):
            path = real
        check_place(path, real)
        check_taken(path)
    except OSError as error:
        raise unwritten(path, str(error)) from error
    return path


def check_place(path: Path, real: Path) -> None:
    """Refuse the places that are never a checkpoint: the current folder, what holds it, homes and roots."""
    if path.is_symlink():
        raise not_ours(str(path), "it is a symbolic link")
    with suppress(FileNotFoundError):  # the current folder was deleted
        here = Path.cwd().resolve()
        if real == here:
            raise not_ours(str(path), "it is the current folder")
        if real in here.parents:
            raise not_ours(str(path), "the current folder lies in it")
    if real == Path(os.path.realpath(os.path.expanduser("~"))):
        raise not_ours(str(path), "it is your home folder")
    if os.path.ismount(real):
        raise not_ours(str(path), "it is the root of a file system")


def check_taken(path: Path) -> None:
    """Refuse a place where something is that Piper did not write, see [Note: ours]."""
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise not_ours(str(path), "a file of this name exists")
    if damaged(path):
        return  # it is set aside, not replaced
    foreign = strangers(path)
    if foreign is None:
        why = f"the folder exists, and is not a checkpoint: it holds {listed(entries(path))}"
        raise not_ours(str(path), why)
    if foreign:
        raise not_ours(str(path), f"the checkpoint there holds files that are not its own: {listed(foreign)}")


def entries(path: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(os.listdir(path))


def strangers(path: Path) -> list[str] | None:
    """Return the names in a folder of ours that it does not list; None: the folder is not ours."""
    own, names = listed_in(path), entries(path)
    if own is None and names:
        return None
    return [name for name in names if name not in (own or ())]


def listed_in(path: Path) -> set[str] | None:
    """Return the files that a checkpoint or an export of ours lists; None: it is neither."""
    try:
        if (path / FILE).is_file():
            return {FILE, *parse(path, (path / FILE).read_bytes().decode("utf-8")).files}
        if (path / MARK).is_file():
            fields = json.loads((path / MARK).read_bytes())
            if fields["format"] == EXPORT:
                return {MARK, *map(str, fields["files"])}
    except (DamagedError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None


def damaged(path: Path) -> bool:
    """Return whether a folder is a checkpoint of ours with a damaged or lost record, by its file names."""
    names = entries(path)
    if not names or not all(OURS.fullmatch(name) for name in names):
        return False
    if FILE not in names:
        return STEP.fullmatch(path.name) is not None
    known = len(names) > 1 or STEP.fullmatch(path.name) is not None  # a record alone may be another program's
    return known and listed_in(path) is None


def remove(folder: Path) -> None:
    """Remove a folder of ours: its files one by one, then the folder. Raise an OSError if others are left."""
    if folder.is_symlink() or not folder.is_dir():
        return
    own = listed_in(folder) or set()
    begun = own == {MARK}  # an export that was never completed: all in its hidden folder is ours
    for name in sorted(entries(folder), key=lambda name: name in (FILE, MARK)):  # record and mark last
        if begun or name in own or OURS.fullmatch(name):
            (folder / name).unlink()
    folder.rmdir()
