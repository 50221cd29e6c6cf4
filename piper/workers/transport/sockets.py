"""Sockets of this process and of the libraries in it: reading, and noticing that the other side is lost."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper.workers.timeouts import TIMEOUTS

DESCRIPTORS = Path("/proc/self/fd")
PROBES = 3  # times that a silent machine is asked before its connections end


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


def keep_alive(end: socket.socket) -> None:
    """Let waits on a connection end when the other machine is lost: it cannot close the connection."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": TIMEOUTS.link_idle,
        "TCP_KEEPINTVL": TIMEOUTS.link_probe,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": TIMEOUTS.unread * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextmanager
def kept_alive() -> Iterator[None]:
    """Let waits on the sockets that are opened inside the block end when the other machine is lost."""
    before = sockets()
    yield
    for fd, inode in sockets().items():
        if before.get(fd) != inode:
            with socket.socket(fileno=os.dup(fd)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    keep_alive(end)


def sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor."""
    inodes: dict[int, int] = {}
    if not DESCRIPTORS.exists():
        return inodes  # then a wait ends with its timeout
    for name in os.listdir(DESCRIPTORS):
        try:
            about = os.fstat(int(name))
        except OSError:
            continue  # the one that listed them
        if stat.S_ISSOCK(about.st_mode):
            inodes[int(name)] = about.st_ino
    return inodes
