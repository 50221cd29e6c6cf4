"""Sockets that libraries open in this process: shut, or watched for the loss of the other machine."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from piper.launchers.transport.channel import keep_alive

DESCRIPTORS = Path("/proc/self/fd")


class OpenSockets:
    """Records which sockets are opened, to shut them: gloo ends a wait only when it loses its peer."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}  # descriptors, and which file each was

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the sockets that are opened inside the block."""
        before = sockets()
        yield
        self.opened |= {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}

    def keep_alive(self) -> None:
        """Let waits on the recorded sockets end when the other machine is lost."""
        for fd in self.opened:
            with socket.socket(fileno=os.dup(fd)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    keep_alive(end)

    def shut(self) -> None:
        """Shut the recorded sockets. Every wait on them, on either side, then ends with an error."""
        now = sockets()
        for fd, inode in self.opened.items():
            if now.get(fd) == inode:
                with suppress(OSError):  # the other side was faster, or gloo's own thread closes it too
                    shut(fd)
        self.opened = {}


def shut(fd: int) -> None:
    """Shut a socket, and leave its descriptor to its owner."""
    with socket.socket(fileno=os.dup(fd)) as end:
        # One that listens must stay: gloo ends the process when it cannot accept.
        if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            end.shutdown(socket.SHUT_RDWR)


def sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor."""
    found: dict[int, int] = {}
    if not DESCRIPTORS.exists():
        return found  # then a wait ends with its timeout
    for name in os.listdir(DESCRIPTORS):
        try:
            about = os.fstat(int(name))
        except OSError:
            continue  # the one that listed them
        if stat.S_ISSOCK(about.st_mode):
            found[int(name)] = about.st_ino
    return found
