"""What can be seen of a worker from outside, and how to end it, whatever state it is in.

Nothing heavy is imported: this runs where a worker is past answering.
"""

import mmap
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is seen of a worker."""

    running: tuple[int, ...] = ()  # places in its plan, one for each stream that is at work
    stopped: bool = False


def stopped(process: int) -> bool:
    """Whether a process of this machine has been stopped by a signal; where that cannot be seen, no."""
    return state(process) in ("T", "t")


def gone(process: int) -> bool:
    """Whether a process of this machine has ended, though its parent may not have asked for it yet."""
    return state(process) in ("", "Z", "X")


def state(process: int) -> str:
    """The letter that the system has for what a process does; none, if there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def running(cells: Sequence[int]) -> tuple[int, ...]:
    """The instructions that a device's marks say are running."""
    return tuple(number - 1 for number in cells if number)


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

    def open(self) -> int | None:
        """Open the file. None: it is not a file of this machine."""
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError:
            return None
        about = os.fstat(descriptor)
        if (about.st_dev, about.st_ino) == self.stamp:
            return descriptor
        os.close(descriptor)  # a process of another machine has the same number
        return None


def started(process: int) -> str:
    """Return when a process of this machine started. Empty: there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


class NodeMonitor:
    """Watches the workers of one machine, from a process of its own that ends with the driver.

    It holds their marks open, so that they can be read when a worker is dead, and no file is left behind.
    """

    def __init__(self) -> None:
        self.processes: dict[int, tuple[int, str]] = {}  # by device: the process, and when it started
        self.marks: dict[int, memoryview] = {}

    def hold(self, workers: Mapping[int, tuple[int, SharedFile]]) -> None:
        """Begin to watch workers, each a process and where its marks are."""
        for device, (process, spot) in workers.items():
            self.processes[device] = (process, started(process))
            descriptor = spot.open()
            if descriptor is not None:
                self.marks[device] = memoryview(mmap.mmap(descriptor, 0)).cast("q")
                os.close(descriptor)

    def look(self) -> dict[int, Look]:
        """Return what is seen of the workers."""
        return {
            device: Look(running=running(self.marks.get(device, ())), stopped=stopped(process))
            for device, (process, _) in self.processes.items()
        }

    def sweep(self, devices: Iterable[int]) -> None:
        """End workers that still run, stopped or not."""
        for device in devices:
            process, began = self.processes.get(device, (0, ""))
            if began and started(process) == began:  # else it is not our worker that has this number now
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
