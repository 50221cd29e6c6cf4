"""Processes of a test that end with it, whatever ends it, and with them all that they have started."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from uuid import uuid4

from piper.process.process_table import stat_field
from tests import warm

MARK = "PIPER_TEST_FAMILY"
ENDING = 20.0  # seconds that ending all of them may take


class Family:
    """Processes, and whoever descends from them.

    torchrun starts each rank in a session of its own, and one that is killed leaves its ranks behind: neither a
    group nor a parent leads to them. So all of a family carry a mark in their environment.
    """

    def __init__(self) -> None:
        self.mark = uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        fresh: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a process in a group of its own; what it prints can be read.

        fresh: a new Python process, as Ray wants one, which renames its processes. Else one that is warm.
        """
        process = (subprocess.Popen if fresh else warm.Popen)(
            words,
            env={**env, MARK: self.mark},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def members(self) -> list[int]:
        """Those that live; one that has ended and waits for its parent does not."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environment.read_bytes().split(b"\0"):
                    found.append(int(environment.parent.name))
            except OSError:
                continue  # it has just ended, or is somebody else's
        return found

    def forked(self, module: str) -> list[int]:
        """Those that run a module and were forked by another one that does, from the first to the last."""
        found = {str(pid) for pid in self.members() if module.encode() in command_of(pid)}
        return sorted(int(pid) for pid in found if stat_field(int(pid), 1) in found)

    def end(self) -> None:
        """End all of them, also those that start while this looks."""
        until = time.monotonic() + ENDING
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        while members := self.members():
            assert time.monotonic() < until, f"processes {members} do not end"
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self.started:
            process.wait(max(0.1, until - time.monotonic()))
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


@contextmanager
def family() -> Iterator[Family]:
    """A family that ends with the block: when a test fails, is interrupted or runs out of time, too."""
    members = Family()
    try:
        yield members
    finally:
        members.end()


def command_of(process: int) -> bytes:
    """The command line of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def free_port() -> int:
    """A port of this machine, below those that the system gives to connections: nobody takes it meanwhile."""
    for port in Random().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are all in use")


def wait_for(files: list[Path], bound: float) -> None:
    """Wait until files are there: what a process does first can be to make one."""
    until = time.monotonic() + bound
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, f"{files} are not there after {bound:g} s"
        time.sleep(0.05)
