"""Files without a name, in memory that processes of one machine share. Each ends with its last user.

Nothing heavy is imported: an agent of a machine uses them, and has no torch.
"""

import mmap
import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")  # a file here lies in memory; elsewhere the system keeps what it can there


def nameless_file(size: int) -> int:
    """Return the descriptor of a new file that is in no folder and ends with its last user."""
    with tempfile.TemporaryFile(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as file:
        file.truncate(max(size, 1))
        return os.dup(file.fileno())


def new_marks(width: int) -> int:
    """Return the descriptor of memory in which a worker marks the progress of `width` streams.

    It is shared, so that it can be read when the worker is dead or stopped.
    """
    return nameless_file(8 * width)


def map_marks(descriptor: int) -> memoryview:
    """Return the marks of a worker: for every stream the number of the running instruction plus one, or 0."""
    return memoryview(mmap.mmap(descriptor, 0)).cast("q")
