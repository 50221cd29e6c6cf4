"""Memory that processes of one machine share, and that ends with the last of them: files without a name."""

import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MEMORY = Path("/dev/shm")  # a file here lies in memory; elsewhere the system keeps what it can there
ALIGNMENT = 64


def nameless_file(size: int) -> int:
    """The descriptor of a new file that is in no folder, so that no death of a process can leave it behind."""
    with tempfile.TemporaryFile(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as file:
        file.truncate(max(size, 1))
        return os.dup(file.fileno())


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where a tensor lies in shared memory."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(values: Mapping[str, Tensor]) -> dict[str, Entry]:
    """A place for each tensor, one after another."""
    index: dict[str, Entry] = {}
    offset = 0
    for name, value in values.items():
        nbytes = value.numel() * value.element_size()
        index[name] = Entry(offset=offset, nbytes=nbytes, dtype=value.dtype, shape=tuple(value.shape))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return index


def share(values: Mapping[str, Tensor], index: Mapping[str, Entry]) -> int:
    """Write tensors into a nameless file; its descriptor."""
    size = max((entry.offset + entry.nbytes for entry in index.values()), default=0)
    descriptor = nameless_file(size)
    with mmap.mmap(descriptor, max(size, 1)) as memory:
        for name, entry in index.items():
            if entry.nbytes:
                raw = values[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
                torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset).copy_(
                    raw
                )
    return descriptor


class SharedValues:
    """Tensors that another process wrote, by name. Whoever changes one changes a copy."""

    def __init__(self, descriptor: int, index: Mapping[str, Entry]) -> None:
        self.index = index
        self.memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)

    def __call__(self, name: str) -> Tensor:
        entry = self.index[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = entry.nbytes // entry.dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=entry.dtype, count=count, offset=entry.offset)
        return flat.view(entry.shape)


class Marks:
    """Where each device is in its plan: for every stream, the instruction that runs, or none.

    They lie in shared memory, so that they can be read when the worker that wrote them is dead or stopped.
    """

    def __init__(self, descriptor: int, devices: Iterable[int], width: int) -> None:
        self.row = {device: i for i, device in enumerate(devices)}
        self.width = width
        self.cells = memoryview(mmap.mmap(descriptor, self.size(len(self.row), width))).cast("q")

    @staticmethod
    def size(devices: int, width: int) -> int:
        """The bytes that marks take."""
        return 8 * devices * width

    def of(self, device: int) -> memoryview:
        """One device's cells: a stream each, the number of the running instruction plus one, 0 for none."""
        first = self.row[device] * self.width
        return self.cells[first : first + self.width]
