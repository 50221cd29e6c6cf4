"""Waiting for descriptors, also those beyond the 1,024 that `select` can take."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from piper.workers.processes import gone
from piper.workers.transport import fork_server
from piper.workers.transport.fork_server import FORKED, NOTICE, ForkServer

MANY = 1100


@contextmanager
def many_open() -> Iterator[None]:
    """Hold so many descriptors that the next ones are beyond what `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MANY + 200:
        pytest.skip("this machine allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 200), hard))
    held: list[int] = []
    try:
        held += [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_start_and_end_beyond_those_of_select() -> None:
    with many_open():
        server = ForkServer(module="tests.workers.idle", preload="json")
        try:
            here, there = socket.socketpair()
            with here, there:
                pid = server.fork([there.fileno()])
            assert server.fileno() > 1024
            server.wait([pid], 30.0)
            assert pid in server.ended()
        finally:
            server.close()


def test_a_process_with_the_number_of_one_that_has_ended_lives() -> None:
    server, (here, there) = ForkServer("tests.workers.idle", "json"), socket.socketpair()
    with here, there:
        try:
            server.warm()
            end, server.socket, server.exits[7] = server.socket, here, -signal.SIGKILL
            there.sendall(NOTICE.pack(FORKED, 7, 0))
            assert server.fork([there.fileno()]) == 7 and server.ended() == {}
            server.socket = end
        finally:
            server.close()


def test_a_fork_server_that_is_slow_still_says_how_a_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    server, (here, there) = ForkServer("tests.workers.idle", "json"), socket.socketpair()
    with here, there:
        try:
            pid = server.fork([there.fileno()])
            assert server.end_of(pid) is None
            os.kill(server.server, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            while not gone(pid):
                time.sleep(0.01)
            assert server.end_of(pid) == "the process has ended", "nobody can say how"
            monkeypatch.setattr(fork_server, "stopped", lambda process: False)  # as if it were only slow
            threading.Timer(0.3, os.kill, (server.server, signal.SIGCONT)).start()
            assert server.end_of(pid) == "the process was killed by SIGKILL"
        finally:
            server.close()
