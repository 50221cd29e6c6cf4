"""Files that a user names, and folders, files and keys that only the user of this process may change.

A file that Piper did not write is never replaced.
"""

import os
import secrets
import stat
import tempfile
from contextlib import suppress
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


KEY_BYTES = 32
OTHERS = 0o077  # every permission of the group and of other users
OTHERS_WRITE = 0o022


def private_folder(path: Path, by: str) -> Path:
    """Return the folder at `path`, made with mode 0700 if there is none.

    A folder that belongs to another user, or that others may write to, is refused: its contents cannot be
    trusted. One that others may only read is closed to them.
    """
    hint = f"name a folder that you may write to, not {path}"
    with file_errors("a private folder cannot be used", by, hint):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.stat()
        problem = _problem(about, OTHERS_WRITE)
        if problem is None and about.st_mode & OTHERS:
            path.chmod(0o700)
    if problem is not None:
        raise distrusted("folder", path, problem, by, "remove it, or name another; mode 0700 is meant")
    return path


def _problem(about: os.stat_result, forbidden: int) -> str | None:
    """Return why a file of this status cannot be trusted. None: it can."""
    if about.st_uid != os.geteuid():
        return f"it belongs to user {about.st_uid}, and this process runs as user {os.geteuid()}"
    if about.st_mode & forbidden:
        return f"its mode is {stat.S_IMODE(about.st_mode):04o}"
    return None


def distrusted(kind: str, path: Path, why: str, by: str, hint: str) -> ConfigError:
    """Return the error of a file or folder that others could have changed or read."""
    return ConfigError(
        f"a {kind} that others may use is not trusted",
        by=by,
        facts={"path": str(path), "why": why},
        hint=hint,
    )


def read_private(path: Path, by: str) -> bytes:
    """Return the contents of a file, if it belongs to this user and no other user may read or write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise distrusted("key file", path, str(error), by, "name a regular file of mode 0600") from error
    with open(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        problem = _problem(about, OTHERS)
        if not stat.S_ISREG(about.st_mode):
            problem = "it is not a regular file"
        if problem is not None:
            raise distrusted("key file", path, problem, by, f"chmod 600 {path}, and make it yours")
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 that is either whole or absent. A file of that name is kept."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".new-")  # of mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    finally:
        os.unlink(draft)


def user_key(path: Path, by: str) -> bytes:
    """Return the key in a file of this user, made at the first call."""
    private_folder(path.parent, by)
    try:
        key = read_private(path, by)
    except FileNotFoundError:
        with (
            file_errors("a key cannot be written", by, f"make {path.parent} writable"),
            suppress(FileExistsError),  # another process was faster
        ):
            write_private(path, secrets.token_bytes(KEY_BYTES))
        key = read_private(path, by)
    if len(key) < KEY_BYTES:
        why = f"it holds {len(key)} bytes"
        raise distrusted("key file", path, why, by, f"remove {path}: it is made again")
    return key
