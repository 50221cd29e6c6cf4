"""Ending communication in a process that goes on: gloo has no way to end a wait but to lose its peer."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


class OpenSockets:
    """The sockets that were opened while this was recording."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}  # descriptors, and which file each was

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is opened inside."""
        before = sockets()
        yield
        self.opened = {fd: inode for fd, inode in sockets().items() if before.get(fd) != inode}

    def cut(self) -> None:
        """End what goes over them: whoever waits, on either side, is told that the other is gone."""
        now = sockets()
        for fd, inode in self.opened.items():
            if now.get(fd) == inode:
                with suppress(
                    OSError
                ):  # the other side was faster, or gloo's own thread, which closes it too
                    shut(fd)
        self.opened = {}


def shut(fd: int) -> None:
    """End what goes over a socket, and leave the descriptor to its owner."""
    with socket.socket(fileno=os.dup(fd)) as end:
        # One that listens must stay: gloo ends the process when it cannot accept.
        if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            end.shutdown(socket.SHUT_RDWR)


def sockets() -> dict[int, int]:
    """The sockets of this process, by descriptor."""
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
