"""What can be seen of a worker from outside, and how to end it, whatever state it is in.

Nothing heavy is imported: this runs where a worker is past answering.
"""

import os
import signal
import struct
from collections.abc import Mapping, Sequence
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


def look_at(workers: Mapping[int, tuple[int, str]]) -> dict[int, Look]:
    """What is seen of workers of this machine, each a process and the file of its marks."""
    found: dict[int, Look] = {}
    for device, (process, path) in workers.items():
        try:
            data = Path(path).read_bytes()
        except OSError:
            data = b""
        found[device] = Look(
            running=running(struct.unpack(f"{len(data) // 8}q", data)), stopped=stopped(process)
        )
    return found


def sweep(workers: Sequence[tuple[int, str]]) -> None:
    """End workers of this machine that still run, stopped or not, and remove the files of their marks."""
    for process, path in workers:
        if Path(path).exists():  # else it is not our worker that has this number now
            Path(path).unlink()
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
