"""The side that asks: `subprocess.Popen` and `subprocess.run`, over a warm process."""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from piper.workers.processes import read_exactly
from piper.workers.transport import fork_server

ROOT = Path(__file__).parents[2]
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
ROOM = "PIPER_TEST_ROOM"  # fills the space in which the environment of a fork is written
SPACE = 16_384  # bytes of arguments, and as many of the environment


class Server:
    """A warm process of this one, at the other end of a socket."""

    def __init__(self, connection: socket.socket, process: int) -> None:
        self.connection, self.process = connection, process
        self.lock, self.owner = threading.Lock(), os.getpid()

    def fork(self, request: dict[str, object], descriptors: Sequence[int]) -> int:
        """Start a program in a child of this process. Return its number."""
        text = json.dumps(request).encode()
        with self.lock:
            adopt(True)
            try:
                socket.send_fds(self.connection, [len(text).to_bytes(8, "big")], descriptors)
                self.connection.sendall(text)
                return int.from_bytes(read_exactly(self.connection, 8), "big")
            finally:
                adopt(False)


def adopt(on: bool) -> None:
    """Let this process become the parent of a descendant whose own parent ends, or not any more."""
    ctypes.CDLL(None).prctl(SUBREAPER, int(on), 0, 0, 0)


SERVERS: list[Server] = []  # the warm process of this one, once there is one
STARTING = threading.Lock()


def server() -> Server:
    """Return the warm process of this one; start it first where there is none."""
    with STARTING:
        if not SERVERS or SERVERS[0].owner != os.getpid():
            here, there = socket.socketpair()
            words = [sys.executable, "-m", "tests.warm.serve", str(there.fileno()), " " * SPACE]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", ROOM: " " * SPACE}
            with there:
                process = PlainPopen(
                    words, cwd=ROOT, env=env, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
                )
            SERVERS[:] = [Server(here, process.pid)]
            atexit.register(close, os.getpid(), here, process)
    return SERVERS[0]


def children() -> set[int]:
    """Return the children of this process, without its warm process."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in files for pid in file.read_text().split()} - {
        server.process for server in SERVERS
    }


def close(owner: int, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a warm process with the process that started it; a fork of that one leaves it alone."""
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


PlainPopen = subprocess.Popen  # also after this module's own has taken its place


class Popen(subprocess.Popen[Any]):
    """A process as `subprocess.Popen` starts it; a Python program is forked from a warm process."""

    def _execute_child(self, *given: object) -> None:
        start = super()._execute_child  # type: ignore[misc]
        asked = signature(start).bind(*given).arguments
        words = program_of(asked)
        if words is None:
            start(*given)
            return
        pipes = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        ours = [os.dup(place if pipe == -1 else pipe) for place, pipe in enumerate(pipes)]
        request = {
            "words": words,
            "cwd": os.path.abspath(asked["cwd"] or os.getcwd()),
            "env": dict(os.environ if asked["env"] is None else asked["env"]),
            "passed": list(asked["pass_fds"]),
            "session": asked["start_new_session"],
        }
        try:
            self.pid = server().fork(request, [*ours, *asked["pass_fds"]])
        finally:
            for descriptor in ours:
                os.close(descriptor)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in PIPES))  # type: ignore[attr-defined]


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
PLAIN = {"preexec_fn": None, "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1}


def program_of(asked: dict[str, Any]) -> list[str] | None:
    """Return the words after `python`, if this is a Python program that a fork can run."""
    words = [asked["args"]] if isinstance(asked["args"], str) else [os.fspath(word) for word in asked["args"]]
    if words[0] != sys.executable or any(asked[name] != value for name, value in PLAIN.items()):
        return None
    if words[1:2] == ["-u"]:  # a fork writes what it prints when it ends, or when its program says so
        del words[1]
    if len(words) < 2 or (words[1].startswith("-") and words[1] not in ("-c", "-m")):
        return None
    return words[1:] if sys.platform == "linux" else None


def run(words: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.CompletedProcess[Any]:  # noqa: ANN401
    """Run a program as `subprocess.run` does."""
    check, timeout, given = (
        options.pop("check", False),
        options.pop("timeout", None),
        options.pop("input", None),
    )
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(words, **options) as process:
        try:
            out, errors = process.communicate(given, timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, out, errors)
    return subprocess.CompletedProcess(words, process.returncode, out, errors)


@cache  # once in a process: a test may run pytest in it
def warm_fork_servers() -> None:
    """Let the fork servers of this process be forked from its warm process, until it ends."""
    part = SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    patch.object(fork_server, "subprocess", part).start()


@cache
def warm_raylets() -> None:
    """Let the raylets that this process starts have warm workers, until it ends."""
    from ray._private import services

    class RayletPopen(Popen):
        """A process of Ray's; a raylet is a fork that becomes one."""

        def __init__(self, words: Sequence[str], **options: Any) -> None:  # noqa: ANN401
            if Path(words[0]).name == "raylet":
                words = [sys.executable, "-m", "tests.warm.raylet", *words]
                options["preexec_fn"] = None  # that program does what it would
            super().__init__(words, **options)

    patch.object(services, "ConsolePopen", RayletPopen).start()
