"""A lock on a folder: one run at a time. The kernel releases it when the process ends, however it ends."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper.errors import ConfigError, file_errors

LOCK, FORMAT = "run.lock", "piper run"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Hold the lock of a folder, and yield a warning if its file system has no locks.

    The file stays when the lock is released: only the kernel's lock on it counts, so no lock is ever stale.
    """
    path = folder / LOCK
    hint = "name a folder you own, on a disk with room: --out DIR"
    with file_errors("the run's folder cannot be locked", folder, hint):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    warning, locked_here = None, True

    def release() -> None:
        nonlocal locked_here
        if locked_here:  # once: another file may have the number of a descriptor that was closed
            locked_here = False
            os.close(descriptor)

    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another run is using this folder",
                by=str(folder),
                facts={"holder": holder(descriptor)},
                hint="wait for it or stop it, or name another folder with --out",
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warning = f"{folder} cannot be locked ({error.strerror}): start no second run in it"
        # A child shares the lock: one that outlives this process must not hold it.
        os.register_at_fork(after_in_child=release)
        about = {"format": FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(about) + "\n").encode(), 0)
        yield warning
    finally:
        release()


def holder(descriptor: int) -> str:
    """Return who holds a lock, in words."""
    about = read_lock(os.pread(descriptor, 4096, 0))
    return f"process {about['pid']} on {about['host']}" if about else "a process that has just started"


def read_lock(data: bytes) -> dict[str, object] | None:
    """Return what a lock file says of its holder; None: it is not a lock file of ours."""
    try:
        about = json.loads(data)
        return about if about["format"] == FORMAT and {"pid", "host"} <= about.keys() else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
