"""Writes single files that a user names, and never replaces one that Piper did not write."""

import os
from pathlib import Path

from piper.errors import ConfigError, file_errors

LOOKED = 4096  # bytes at the beginning and at the end in which the mark is looked for


def write_output(path: Path, content: str | bytes, mark: str, what: str = "this file") -> None:
    """Write a file. One that exists is replaced if it is empty or holds `mark`, and refused otherwise.

    mark: a text that each file of this kind holds near its beginning or its end. what: names it in an error.
    """
    data = content.encode() if isinstance(content, str) else content
    assert mark.encode() in data[:LOOKED] + data[-LOOKED:], "else it could not be replaced later"
    hint = "name a file in a folder that exists and that you own"
    with file_errors(f"{what} cannot be written", path, hint):
        check_output(path, mark)
        path.write_bytes(data)


def check_output(path: Path, mark: str) -> None:
    """Refuse a file that exists, is not empty and does not hold `mark`: Piper did not write it."""
    if path.is_file() and not marked(path, mark):
        raise not_replaced(path)


def refuse_existing(path: Path) -> None:
    """Refuse a file that exists and is not empty: it may have been edited since it was written."""
    if path.exists() and (not path.is_file() or path.stat().st_size):
        raise ConfigError(
            "this file exists",
            by=str(path),
            hint="name another file, or move this one away first",
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            "the folder of this file does not exist",
            by=str(path),
            hint="make the folder first, or name another",
        )


def marked(path: Path, mark: str) -> bool:
    """Return whether a file is empty, or holds the mark that Piper writes."""
    with path.open("rb") as file:
        head = file.read(LOOKED)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - LOOKED))
        return not size or mark.encode() in head or mark.encode() in file.read()


def not_replaced(path: Path) -> ConfigError:
    """Return the error for a file that Piper did not write and will not replace."""
    return ConfigError(
        "this file exists, and Piper did not write it",
        by=str(path),
        facts={"has": f"{path.stat().st_size} bytes"},
        hint="name another file, or move this one away first",
    )
