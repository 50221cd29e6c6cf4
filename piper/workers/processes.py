"""The state of processes of this machine, and the files, memory and signals that they share.

Nothing heavy is imported: some of this runs where a worker no longer answers, or in an agent, without torch.
"""

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import monotonic, time
from types import FrameType

from piper.process.process_table import stat_field
from piper.workers.timeouts import TIMEOUTS

MEMORY = Path("/dev/shm")  # a file here lies in memory; elsewhere the system keeps what it can there
STREAMS = 128  # of a worker, for all its programs, that have a mark of their own
Place = tuple[int, int, int]  # in the memory of versions: a device, a generation, and where


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What is known of one device's process from outside."""

    process: int
    running: tuple[int, ...] = ()  # places in its plan, one for each stream that is at work
    ended: str | None = None  # how the process ended. None: it lives
    stopped: bool = False


def stopped(process: int) -> bool:
    """Return whether a process of this machine is stopped by a signal. False where that cannot be seen."""
    return stat_field(process, 0) in ("T", "t")


def gone(process: int) -> bool:
    """Return whether a process of this machine has ended, even if its parent has not reaped it."""
    return stat_field(process, 0) in ("", "Z", "X")


def how(status: int) -> str:
    """Return how a process ended, in words."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"


def running(marks: Sequence[int]) -> tuple[int, ...]:
    """Return the instructions that run, by the marks of a device."""
    return tuple(number - 1 for number in marks if number)


class Termination:
    """Notes SIGTERM instead of ending the process: a worker ends with its driver, which saves first."""

    def __init__(self) -> None:
        self.asked = self.reported = False

    def install(self) -> None:
        """Handle the signal from now on. Needs the main thread."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def news(self) -> bool:
        """Return whether the signal has come since the last call."""
        new, self.reported = self.asked and not self.reported, self.asked
        return new


class StopWatch:
    """Decides which processes have been stopped by a signal for so long that they count as lost."""

    def __init__(self, bound: float = TIMEOUTS.stopped) -> None:
        self.bound = bound
        self.since: dict[int, float] = {}

    def lasting(self, process: int, is_stopped: bool) -> bool:
        """Note whether a process is stopped now. Return whether it has been for longer than the bound."""
        if not is_stopped:
            self.since.pop(process, None)
            return False
        return monotonic() - self.since.setdefault(process, monotonic()) > self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file without a name, as another process of the machine finds it."""

    path: str
    stamp: tuple[int, int]  # device and inode: what tells a file from all others of a machine

    @staticmethod
    def of(descriptor: int) -> "SharedFile":
        """Return where other processes find a file of this process."""
        about = os.fstat(descriptor)
        return SharedFile(path=f"/proc/{os.getpid()}/fd/{descriptor}", stamp=(about.st_dev, about.st_ino))

    def open(self) -> int:
        """Open the file, which must be one of this machine."""
        descriptor = os.open(self.path, os.O_RDWR)
        about = os.fstat(descriptor)
        assert (about.st_dev, about.st_ino) == self.stamp, "a process of another machine has the same number"
        return descriptor


def nameless_file(size: int) -> int:
    """Return the descriptor of a new file that is in no folder and ends with its last user."""
    with tempfile.TemporaryFile(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as file:
        file.truncate(max(size, 1))
        return os.dup(file.fileno())


def write_at(file: int, at: int, data: bytes) -> None:
    """Write bytes into a file from the beginning of a page on."""
    os.posix_fallocate(file, at, len(data))  # memory that is missing is an error here
    with mmap.mmap(file, len(data), offset=at) as memory:
        memory[:] = data


REMOVER = """
import os, shutil, signal, sys, time
from pathlib import Path
folder, word = Path(sys.argv[1]), sys.stdin.readline()
def ours(process):  # Ray writes new titles over command lines and environments; its logs stay open
    program = os.readlink(process / "exe")
    files = [os.readlink(file) for file in (process / "fd").iterdir()]
    known = program == os.path.realpath(sys.executable) or "/ray/core/" in program
    return known and any(file.startswith(f"{folder}/") for file in files)
until, absent = time.monotonic() + 60, 0
while time.monotonic() < until and absent < (1 if word else 8):
    if not word:  # the driver was killed: its workers and Ray may still run, and write
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if ours(process):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
    shutil.rmtree(folder, ignore_errors=True)
    absent = 0 if folder.exists() else absent + 1
    time.sleep(0 if word else 0.5)
"""


@contextmanager
def folder_for_now(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """Make a folder that another process removes after the block, or when this process is killed."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=where)
    lock = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: there `remove_left` keeps every folder
        fcntl.flock(lock, fcntl.LOCK_SH)  # while this process lives: `remove_left` keeps the folder
    words = [sys.executable, "-I", "-S", "-c", REMOVER, folder]
    remover = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield Path(folder)
    finally:
        with suppress(subprocess.TimeoutExpired):  # then it goes on by itself
            remover.communicate("now\n", timeout=TIMEOUTS.folder_removed)
        os.close(lock)


def remove_left(prefix: str, where: Path) -> None:
    """Remove the folders of processes that were killed together with the processes that remove them."""
    for path in where.glob(f"{prefix}*"):
        with suppress(OSError):  # it is gone, or locked, or another user's
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder).st_ctime < time() - 60:  # else it may be about to be locked
                    rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)


class ClosedError(ConnectionError):
    """The other process has closed its end, or sends what is not a message."""


def read_exactly(end: socket.socket, size: int, who: str = "the other process") -> bytes:
    """Read this many bytes within the socket's timeout. Raise ClosedError if the other end is closed."""
    data = b""
    while len(data) < size:
        got = end.recv(size - len(data))
        if not got:
            raise ClosedError(f"{who} is gone")
        data += got
    return data


def free_memory() -> int | None:
    """Return the bytes of shared memory that are free. None: it has no bound of its own."""
    if not MEMORY.is_dir():
        return None
    system = os.statvfs(MEMORY)
    return system.f_bavail * system.f_frsize


def map_marks(descriptor: int) -> memoryview:
    """Return the marks of a worker: for every stream the number of the running instruction plus one, or 0."""
    return memoryview(mmap.mmap(descriptor, 0)).cast("q")
