"""Sockets that libraries open in this process, watched for the loss of the other machine."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper.workers.transport.channel import keep_alive

DESCRIPTORS = Path("/proc/self/fd")


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
