"""The folder through which the state of a run moves to another layout, in memory. Nothing of it stays.

Workers write and read a checkpoint there, so it has a name, and would outlive a run that is killed. The
driver makes it and holds a lock on it. A process of its own waits for the lock: it is free when the driver is
gone, and the folder is removed. What is left if that process is killed too is removed when the next elastic
run of this machine starts, because no process holds its lock.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from piper.workers.processes import MEMORY

MOVED = "piper-resize-"  # begins the names of folders in which a state moves
REMOVER = """
import fcntl, os, shutil, sys, time
try:
    folder = os.open(sys.argv[1], os.O_RDONLY)
except FileNotFoundError:
    sys.exit()
fcntl.flock(folder, fcntl.LOCK_EX)
until = time.monotonic() + 60
while os.path.exists(sys.argv[1]) and time.monotonic() < until:  # a worker may still write, until it is ended
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)
"""


class MovingStates:
    """The folder in memory for states that move, of one run."""

    def __init__(self) -> None:
        """Make the folder, and remove those of runs that were killed."""
        where = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        remove_left(where)
        self.path, self.lock = locked_folder(where)
        words = [sys.executable, "-I", "-S", "-c", REMOVER, str(self.path)]
        self.remover = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self.remover.returncode is not None:
            return
        rmtree(self.path, ignore_errors=True)  # the remover may have been faster
        self.remover.kill()
        self.remover.wait()
        os.close(self.lock)


def locked_folder(where: Path) -> tuple[Path, int]:
    """Return a new folder, and a descriptor that holds a lock on it."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{MOVED}{os.getpid()}-", dir=where))
        with try_lock(path) as lock:
            if lock is not None:
                return path, os.dup(lock)  # the lock stays with its last descriptor
        # Another run has taken it for one that was left, before it was locked.


def remove_left(where: Path) -> None:
    """Remove the folders of runs that were killed: no process holds their locks."""
    for path in where.glob(f"{MOVED}*"):
        with try_lock(path) as lock:
            if lock is not None:
                rmtree(path, ignore_errors=True)


@contextmanager
def try_lock(path: Path) -> Iterator[int | None]:
    """Yield a descriptor with a lock on a folder. None: another process has it, or has removed the folder."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is gone, or another user's
        yield None
        return
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.path.samestat(os.fstat(folder), path.stat())
        except OSError:
            there = False
        yield folder if there else None
    finally:
        os.close(folder)
