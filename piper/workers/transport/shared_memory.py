"""Tensors in memory that processes of one machine share."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.workers.processes import nameless_file

ALIGNMENT = 64  # of a tensor's bytes, so that any element type can be read in place


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies in shared memory."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def layout(values: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return a place for each tensor, one after another."""
    index: dict[str, TensorEntry] = {}
    offset = 0
    for name, value in values.items():
        nbytes = value.numel() * value.element_size()
        index[name] = TensorEntry(offset=offset, nbytes=nbytes, dtype=value.dtype, shape=tuple(value.shape))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return index


def extent(index: Mapping[str, TensorEntry]) -> int:
    """Return the size of all tensors together, in bytes."""
    return max((entry.offset + entry.nbytes for entry in index.values()), default=0)


def raw_bytes(value: Tensor) -> Tensor:
    """Return a tensor's elements as bytes."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


def joined(values: Mapping[str, Tensor], index: Mapping[str, TensorEntry]) -> Tensor:
    """Return tensors as bytes, each in its place."""
    memory = torch.zeros(extent(index), dtype=torch.uint8)
    for name, entry in index.items():
        if entry.nbytes:
            memory[entry.offset : entry.offset + entry.nbytes] = raw_bytes(values[name])
    return memory


def share(values: Mapping[str, Tensor], index: Mapping[str, TensorEntry]) -> int:
    """Write tensors into a nameless file. Return its descriptor."""
    size = extent(index)
    descriptor = nameless_file(size)
    with mmap.mmap(descriptor, max(size, 1)) as memory:
        for name, entry in index.items():
            if entry.nbytes:
                place = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
                place.copy_(raw_bytes(values[name]))
                del place  # before the memory closes under it
    return descriptor


class SharedValues:
    """Tensors that another process wrote, by name. A change is private to this process."""

    def __init__(self, descriptor: int, index: Mapping[str, TensorEntry]) -> None:
        self.index = index
        self.memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE)

    def __call__(self, name: str) -> Tensor:
        entry = self.index[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = entry.nbytes // entry.dtype.itemsize
        flat = torch.frombuffer(self.memory, dtype=entry.dtype, count=count, offset=entry.offset)
        return flat.view(entry.shape)
