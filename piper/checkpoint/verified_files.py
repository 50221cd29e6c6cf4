"""Files that are written once and verified on every read: a digest for each block of their bytes.

[Note: blocks] A reader that needs some elements of a large file reads and verifies only the blocks that hold
them, and uses the very bytes that it verified. Digests are computed while a file is written, from memory.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

BLOCK = 2**22  # bytes for which there is one digest
CACHED = 8  # blocks that a reader keeps: neighbouring tensors share them
DIGEST = 2 * hashlib.sha256().digest_size  # characters


class StorageError(Exception):
    """A file of a checkpoint that cannot be read or written, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: its bytes, and the digest of each block of them."""

    size: int
    digests: tuple[str, ...]


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of some bytes as text."""
    return hashlib.sha256(data).hexdigest()


def write_blocks(path: Path, content: Iterable[memoryview], block: int = BLOCK) -> FileRecord:
    """Write a new file and return its size and digests. Raise an OSError if a file of this name exists."""
    digests: list[str] = []
    hasher, filled, size = hashlib.sha256(), 0, 0
    with path.open("xb", buffering=0) as file:
        for piece in content:
            while piece:
                data, piece = piece[: block - filled], piece[block - filled :]
                left = data
                while left:  # the system may take only some of the bytes at a time
                    left = left[os.write(file.fileno(), left) :]
                hasher.update(data)
                filled += len(data)
                size += len(data)
                if filled == block:
                    digests.append(hasher.hexdigest())
                    hasher, filled = hashlib.sha256(), 0
    if filled:
        digests.append(hasher.hexdigest())
    return FileRecord(size=size, digests=tuple(digests))


def verified_block(
    folder: Path, files: Mapping[str, FileRecord], block: int, name: str, number: int
) -> bytes:
    """Read a block of a file, and verify it."""
    record, first = files[name], number * block
    wanted = min(block, record.size - first)
    try:
        with (folder / name).open("rb") as file:
            file.seek(first)
            data = file.read(wanted)
    except OSError as error:
        raise StorageError(f"{name}: {error}") from error
    if len(data) != wanted:
        raise StorageError(f"{name} has {first + len(data)} bytes, not {record.size}")
    if digest_of(data) != record.digests[number]:
        span = f"{first} to {first + wanted - 1}"
        raise StorageError(f"{name}: bytes {span} are not those that were written (their digest differs)")
    return data


class BlockReader:
    """Reads byte ranges of the files of one folder, and verifies every block that it touches."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], block: int = BLOCK) -> None:
        self.files, self.block = files, block
        self._verified = partial(verified_block, folder, files, block)
        self._block = lru_cache(CACHED)(self._verified)  # without `self`: blocks go when their reader does

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `start` on."""
        end = start + len(out)
        if end > self.files[name].size:
            raise StorageError(f"{name}: it ends at byte {self.files[name].size}, before byte {end}")
        number = start // self.block
        while number * self.block < end:
            first = number * self.block
            low, high = max(start, first), min(end, first + self.block)
            out[low - start : high - start] = self._block(name, number)[low - first : high - first]
            number += 1

    def verify(self) -> None:
        """Read and verify all bytes of all files."""
        for name, record in self.files.items():
            for number in range(-(-record.size // self.block)):
                self._verified(name, number)
