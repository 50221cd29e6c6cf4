"""Tensors on disk: pieces in safetensors files, which can be read back in other pieces.

A checkpoint is not a folder of torch.distributed.checkpoint, whose index is a pickle (see checkpoint/dcp.py).
Pieces lie in safetensors files, and the index in JSON.

[Note: blocks] There is a digest for each block of the bytes of a file. A reader that needs some elements of a
large file reads and verifies only the blocks that hold them, and uses the very bytes that it verified.
Digests are computed while a file is written, from memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from piper.checkpoint.bucket_spans import common_runs
from piper.checkpoint.json_state import dtype_named, name_of_dtype, raw_bytes
from piper.checkpoint.metadata import BLOCK, SUFFIX, FileRecord, Record, SavedPiece, Stored, digest_of
from piper.errors import CONTENT
from piper.ir.sharding import FlatRuns
from piper.runtime.bucket_layout import runs_of_slice, runs_of_whole

CHUNK = 2**26  # bytes of a file that are in memory at a time where runs are picked out of them
CACHED = 8  # blocks that a reader keeps: neighbouring tensors share them
ALIGNED = 8  # bytes: where the data of a safetensors file begins
CODES = {  # how safetensors names the types
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class StorageError(Exception):
    """A file of a checkpoint that cannot be read or written, in words."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorRange:
    """Elements of a flattened tensor of `size` elements: those from `start` on, as many as `tensor` has.

    A tensor of two dimensions holds several runs, which begin `stride` elements from each other.
    """

    key: str
    size: int
    start: int
    tensor: Tensor
    stride: int = 0

    def lies(self, file: str = "") -> SavedPiece:
        """Return where its elements lie in the tensor."""
        count = max(1, len(self.tensor)) if self.tensor.dim() > 1 else 1
        length, stride = self.tensor.numel() // count, self.stride if count > 1 else 0
        return SavedPiece(offset=self.start, length=length, file=file, count=count, stride=stride)

    def stored(self, file: str) -> "StoredRange":
        """Return it as a part that is in a file."""
        dtype = name_of_dtype(self.tensor.dtype)
        return StoredRange(key=self.key, dtype=dtype, size=self.size, piece=self.lies(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRange:
    """A part that is on disk."""

    key: str
    dtype: str
    size: int
    piece: SavedPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of one writer: its parts on disk, and the file that holds them."""

    placed: tuple[StoredRange, ...] = ()
    files: Mapping[str, FileRecord]


def write_parts(folder: Path, name: str, parts: Sequence[TensorRange]) -> Written:
    """Write parts into one file, which is on the disk when this returns."""
    if not parts:
        return Written(files={})
    file = name + SUFFIX
    runs: dict[str, list[TensorRange]] = {}
    for part in sorted(parts, key=lambda part: part.start):  # several of one tensor lie end to end
        runs.setdefault(part.key, []).append(part)
    flat = {key: [part.tensor.reshape(-1) for part in ranges] for key, ranges in runs.items()}
    tensors = {key: several[0] if len(several) == 1 else torch.cat(several) for key, several in flat.items()}
    try:
        record = write_file(folder / file, tensors)
        sync(folder / file)
    except OSError as error:
        raise StorageError(f"{file}: {error}") from error
    return Written(placed=tuple(part.stored(file) for part in parts), files={file: record})


def write_file(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> FileRecord:
    """Write tensors of the host as a safetensors file; `read` gives those with a shape and no elements."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # keeps each aligned
    content = (raw_bytes((read or tensors.__getitem__)(key)) for key in order)
    table: dict[str, object] = {}
    end = 0
    for key in order:
        tensor = tensors[key]
        begin, end = end, end + tensor.nbytes
        dtype, shape = tensor.dtype, [*tensor.shape]
        if dtype == torch.complex128:  # safetensors has no such type: pairs of real numbers
            dtype, shape = torch.float64, [*shape, 2]
        if dtype not in CODES:
            raise StorageError(f"{key} is of type {dtype}, which safetensors files do not hold")
        table[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return write_blocks(path, chain([memoryview(len(text).to_bytes(8, "little") + text)], content))


def write_blocks(path: Path, content: Iterable[memoryview]) -> FileRecord:
    """Write a new file and return its size and digests. Raise an OSError if a file of this name exists."""
    digests: list[str] = []
    hasher, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in content:
            while piece:
                room = BLOCK - size % BLOCK
                data, piece = piece[:room], piece[room:]
                file.write(data)
                hasher.update(data)
                size += len(data)
                if size % BLOCK == 0:
                    digests.append(hasher.hexdigest())
                    hasher = hashlib.sha256()
    if size % BLOCK:
        digests.append(hasher.hexdigest())
    return FileRecord(size=size, digests=tuple(digests))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def index_of(placed: Iterable[Sequence[StoredRange]]) -> dict[str, Stored]:
    """Return the index of what all workers wrote, whose parts make whole tensors."""
    ranges: dict[str, list[StoredRange]] = {}
    for part in chain.from_iterable(placed):
        ranges.setdefault(part.key, []).append(part)
    index: dict[str, Stored] = {}
    for key, parts in ranges.items():
        kinds = {(part.dtype, part.size) for part in parts}
        assert len(kinds) == 1, f"{key} is written as {sorted(kinds)}"
        pieces = tuple(sorted(part.piece for part in parts))
        index[key] = Stored(dtype=parts[0].dtype, size=parts[0].size, pieces=pieces)
        covered(index[key])
    return index


def covered(stored: Stored) -> None:
    """Check that the pieces of a tensor hold every element exactly once."""
    elements = sum(piece.elements for piece in stored.pieces)  # before anything of their size is made
    if elements != stored.size:
        raise ValueError(f"a tensor of {stored.size} elements has {elements} in its pieces")
    if not stored.pieces:
        return
    first, *others = stored.pieces
    if not others and (first.offset, first.count) == (0, 1):  # as most are: without the cost of arrays
        return
    starts = np.concatenate([p.offset + np.arange(p.count) * p.stride for p in stored.pieces])
    lengths = np.concatenate([np.full(piece.count, piece.length) for piece in stored.pieces])
    order = np.lexsort((lengths, starts))  # an empty run comes before the one that begins at its end
    ends = np.cumsum(lengths[order])
    wrong = np.flatnonzero(starts[order] != ends - lengths[order])
    if len(wrong):
        end = int(ends[wrong[0]] - lengths[order][wrong[0]])
        raise ValueError(f"a tensor has a gap or an overlap at element {end}")


def overlaps(stored: SavedPiece, wanted: SavedPiece) -> Iterator[FlatRuns]:
    """Yield what two pieces of a tensor have in common: `here` in the stored, `there` in the wanted one."""
    if stored.elements and wanted.elements:
        yield from common_runs(stored.runs, wanted.runs)


def verified_block(folder: Path, record: Record, name: str, number: int) -> bytes:
    """Read a block of a file, and verify it."""
    file, first = record.files[name], number * record.block
    wanted = min(record.block, file.size - first)
    try:
        with (folder / name).open("rb") as opened:
            opened.seek(first)
            data = opened.read(wanted)
    except OSError as error:
        raise StorageError(f"{name}: {error}") from error
    if len(data) != wanted:
        raise StorageError(f"{name} has {first + len(data)} bytes, not {file.size}")
    if digest_of(data) != file.digests[number]:
        span = f"{first} to {first + wanted - 1}"
        raise StorageError(f"{name}: bytes {span} are not those that were written (their digest differs)")
    return data


class BlockReader:
    """Reads byte ranges of the files of a checkpoint, and verifies every block that it touches."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.files, self.block = record.files, record.block
        # Without `self`: blocks go when their reader does.
        self._block = lru_cache(CACHED)(partial(verified_block, folder, record))

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `start` on."""
        end = start + len(out)
        if end > self.files[name].size:
            raise StorageError(f"{name}: it ends at byte {self.files[name].size}, before byte {end}")
        for number in range(start // self.block, -(-end // self.block)):
            first = number * self.block
            low, high = max(start, first), min(end, first + self.block)
            out[low - start : high - start] = self._block(name, number)[low - first : high - first]


class CheckpointReader:
    """The tensors of a checkpoint. A caller reads only the elements it needs."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.record = record
        self.blocks = BlockReader(folder, record)
        self.places = cache(partial(places_in, self.blocks))  # which bytes of a file hold each tensor of it
        self._runs = cache(partial(starts_in, record))

    def read(self, parts: Iterable[TensorRange]) -> None:
        """Fill the parts' tensors. Elements are converted to the type of the tensor they go to."""
        wanted: list[tuple[str, TensorRange, Tensor, SavedPiece]] = []
        runs: list[tuple[TensorRange, Tensor]] = []
        for part in parts:
            flat = part.tensor.detach()
            if flat.dim() > 1:  # runs that lie apart are put together first
                flat = torch.empty(flat.numel(), dtype=flat.dtype)
                runs.append((part, flat))
            for piece in self._pieces(part):
                wanted.append((piece.file, part, flat, piece))
        for _, part, flat, piece in sorted(wanted, key=itemgetter(0)):  # by file: a block is read once
            for met in overlaps(piece, part.lies()):
                self._fill(flat, part.key, piece, met)
        for part, flat in runs:
            part.tensor.detach().copy_(flat.view(part.tensor.shape))

    def _pieces(self, part: TensorRange) -> Sequence[SavedPiece]:
        """Return the pieces of the tensor that a part belongs to."""
        if not part.tensor.numel():
            return ()
        stored = self.record.tensors.get(part.key)
        if stored is None or stored.size != part.size:
            size = 0 if stored is None else stored.size
            raise StorageError(f"the record has {size} elements of {part.key}, not {part.size}")
        return stored.pieces

    def _fill(self, flat: Tensor, key: str, piece: SavedPiece, met: FlatRuns) -> None:
        """Read the runs that a piece and a part have in common into the part."""
        width = dtype_named(self.record.tensors[key].dtype).itemsize
        rows = max(1, CHUNK // max(1, met.here_step * width))
        for first in range(0, met.count, rows):
            count = min(rows, met.count - first)
            begin = met.here + first * met.here_step
            values = self.values(key, piece, begin, (count - 1) * met.here_step + met.length)
            some = replace(met, here=0, there=met.there + first * met.there_step, count=count)
            runs_of_whole(flat, some).copy_(runs_of_slice(values, some))

    def values(self, key: str, piece: SavedPiece, first: int, length: int) -> Tensor:
        """Read elements of a stored piece: `length` of them from its element `first` on."""
        stored, file = self.record.tensors[key], piece.file
        dtype = dtype_named(stored.dtype)
        begin, end = self.places(file).get(key, (0, -1))
        starts, whole = self._runs(file, key)
        if end - begin != whole * dtype.itemsize:
            raise StorageError(f"{file}: it holds another {key} than the record says")
        raw = torch.empty(length * dtype.itemsize, dtype=torch.uint8)
        at = begin + (starts[piece.offset] + first) * dtype.itemsize
        self.blocks.read(file, at, raw.numpy().data)
        return raw.view(dtype)


def starts_in(record: Record, file: str, key: str) -> tuple[dict[int, int], int]:
    """Return where each piece of a tensor begins in a file, by its offset, and the length of all."""
    starts, end = dict[int, int](), 0
    for piece in sorted(record.tensors[key].pieces):
        if piece.file == file:
            starts[piece.offset], end = end, end + piece.elements
    return starts, end


def places_in(blocks: BlockReader, file: str) -> dict[str, tuple[int, int]]:
    """Read from the header of a file which bytes of it hold each tensor."""
    head, size = bytearray(8), blocks.files[file].size
    blocks.read(file, 0, memoryview(head))
    length = int.from_bytes(head, "little")
    if length > size - 8:
        raise StorageError(f"{file}: its header is longer than the file")
    text = bytearray(length)
    blocks.read(file, 8, memoryview(text))
    places: dict[str, tuple[int, int]] = {}
    try:
        for key, entry in json.loads(text).items():
            if key != "__metadata__":
                low, high = (8 + length + int(offset) for offset in entry["data_offsets"])
                if not 8 + length <= low <= high <= size:
                    raise ValueError(f"{key} lies outside the file")
                places[key] = (low, high)
    except (*CONTENT, RecursionError, OverflowError) as error:
        raise StorageError(f"{file}: its header cannot be read: {error}") from error
    return places
