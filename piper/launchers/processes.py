"""Processes: the state of those on this machine, and the ranks that a launcher such as torchrun has started.

Nothing heavy is imported: some of this runs where a worker no longer answers, and before torch is needed.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import ParamSpec

from piper.errors import ConfigError

P = ParamSpec("P")
STOPPED = 2.0  # seconds for which a process must be stopped to count as lost: a debugger may stop it briefly
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NEARBY = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What is known of one device's process from outside."""

    process: int
    running: tuple[int, ...] = ()  # places in its plan, one for each stream that is at work
    ended: str | None = None  # how the process ended. None: it lives
    stopped: bool = False


def stopped(process: int) -> bool:
    """Return whether a process of this machine is stopped by a signal. False where that cannot be seen."""
    return state(process) in ("T", "t")


def gone(process: int) -> bool:
    """Return whether a process of this machine has ended, even if its parent has not reaped it."""
    return state(process) in ("", "Z", "X")


def state(process: int) -> str:
    """Return the system's letter for the state of a process. Empty: there is no such process."""
    return stat_field(process, 0)


def started(process: int) -> str:
    """Return when a process of this machine started. Empty: there is no such process."""
    return stat_field(process, 19)


def stat_field(process: int, place: int) -> str:
    """Return a field of /proc/PID/stat, counted from the one after the command."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[place]


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

    def __init__(self, bound: float = STOPPED) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The place of this process among the ranks of a job, as torchrun and the like set it."""

    rank: int
    size: int
    local: int  # which of its machine's processes this one is
    nearby: int  # how many of them are on this machine
    address: str  # where they meet
    port: int

    @property
    def leads(self) -> bool:
        """Return whether this process drives the others."""
        return self.rank == 0

    @property
    def with_leader(self) -> bool:
        """Return whether rank 0 is on this machine: ranks are counted machine by machine."""
        return self.rank == self.local

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks are on this machine."""
        return self.nearby == self.size


def rank_environment() -> RankEnvironment | None:
    """Return the rank that the environment gives this process. None: it was started on its own."""
    if any(name not in os.environ for name in NAMES):
        return None
    size = number("WORLD_SIZE")
    return RankEnvironment(
        rank=number("RANK"),
        size=size,
        local=number("LOCAL_RANK"),
        nearby=number(NEARBY) if NEARBY in os.environ else size,
        address=os.environ["MASTER_ADDR"],
        port=number("MASTER_PORT"),
    )


def number(name: str) -> int:
    """Return an environment variable as a number."""
    text = os.environ[name]
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text} is not a number",
            by="launch",
            hint=f"start with torchrun, or unset {', '.join(NAMES)}",
        )
    return int(text)


def check_size(world: RankEnvironment, devices: int, spares: int = 0) -> None:
    """Refuse a number of processes that differs from the number of devices and spares."""
    if spares and world.size != devices + spares:
        raise ConfigError(
            "there is not one process for each device and each spare",
            by="launch",
            facts={
                "processes": f"WORLD_SIZE={world.size}",
                "devices": f"{devices} in the plan",
                "spares": f"--spares {spares}",
            },
            hint=f"start {devices + spares} processes",
        )
    if not spares and world.size != devices:
        raise ConfigError(
            "there is not one process for each device",
            by="launch",
            facts={"processes": f"WORLD_SIZE={world.size}", "devices": f"{devices} in the plan"},
            hint=f"start {devices} processes, or unset {', '.join(NAMES)} and piper starts them",
        )


def on_rank_zero(verb: Callable[P, None]) -> Callable[P, None]:
    """Run a verb on rank 0 only under torchrun, with the other ranks as its workers."""

    @wraps(verb)
    def act(*args: P.args, **kwargs: P.kwargs) -> None:
        world = rank_environment() if kwargs["on"] == "local" else None
        if world is None:
            verb(*args, **kwargs)
        elif world.leads:
            from piper.launchers.rendezvous import leading  # torch is paid for only where it is used

            with leading(world):
                verb(*args, **kwargs)
        else:
            from piper.launchers.torchrun_worker import attend

            sys.exit(attend(world))

    return act
