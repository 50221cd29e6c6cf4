"""Sockets of this process and of the libraries in it: reading, and noticing that the other side is lost."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from piper.workers.timeouts import TIMEOUTS

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
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TIMEOUTS.link_idle)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TIMEOUTS.link_probe)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TIMEOUTS.unread * 1000)


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
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.fstat(int(name))
        except OSError:
            continue  # the one that listed them
        if stat.S_ISSOCK(about.st_mode):
            inodes[int(name)] = about.st_ino
    return inodes
