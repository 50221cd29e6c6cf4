"""Tensors on disk: flat pieces in safetensors files, which can be read back in other pieces.

torch.distributed.checkpoint decides which stored pieces meet which wanted ones, and whether the pieces of all
workers make whole tensors. Its own files are not used: their index is a pickle, which may run code when it is
read. Pieces lie in safetensors files instead, and the index in JSON. Bytes are verified, see [Note: blocks].
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from piper.checkpoint.blocks import BlockReader, FileRecord, StorageError, write_blocks
from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import SUFFIX, Record, Stored

ALIGNED = 8  # bytes: where the data of a safetensors file begins
LONGEST = 2**30  # the largest header that is read, in bytes
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A range of a tensor's elements: `tensor`, flat, begins at `start` of the `size` elements in all."""

    key: str
    size: int
    start: int
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A part that is on disk."""

    key: str
    dtype: str
    size: int
    start: int
    length: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of one writer: its parts on disk, and the file that holds them."""

    placed: tuple[Placed, ...] = ()
    files: Mapping[str, FileRecord]


def write_parts(folder: Path, name: str, parts: Sequence[Part]) -> Written:
    """Write parts into one file, which is on the disk when this returns."""
    if not parts:
        return Written(files={})
    file = name + SUFFIX
    runs: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.start):  # several of one tensor lie end to end
        runs.setdefault(part.key, []).append(part)
    tensors = {
        key: held[0].tensor if len(held) == 1 else torch.cat([part.tensor.view(-1) for part in held])
        for key, held in runs.items()
    }
    try:
        record = write_file(folder / file, tensors)
        sync(folder / file)
    except OSError as error:
        raise StorageError(f"{file}: {error}") from error
    placed = (
        Placed(
            key=part.key,
            dtype=str(part.tensor.dtype).removeprefix("torch."),
            size=part.size,
            start=part.start,
            length=part.tensor.numel(),
            file=file,
        )
        for part in parts
    )
    return Written(placed=tuple(placed), files={file: record})


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write flat tensors of the host as a safetensors file, and return its size and digests."""
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))  # keeps each aligned
    header = header_of({key: tensors[key] for key in order})
    return write_blocks(path, [memoryview(header), *(bytes_of(tensors[key]) for key in order)])


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the beginning of a safetensors file that holds these tensors in their order."""
    table: dict[str, object] = {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape = [tensor.numel()]
        dtype = tensor.dtype
        if dtype == torch.complex128:  # safetensors has no such type: pairs of real numbers
            dtype, shape = torch.float64, [tensor.numel(), 2]
        if dtype not in CODES:
            raise StorageError(f"{key} is of type {dtype}, which safetensors files do not hold")
        table[key] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor of the host."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def index_of(placed: Iterable[Sequence[Placed]]) -> dict[str, Stored]:
    """Return the index of what all workers wrote. torch's planner checks that parts make whole tensors."""
    writers = [*placed]
    plans = [SavePlan([write_item(part) for part in parts]) for parts in writers]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.create_global_plan([*plans, SavePlan([])])  # the planner looks for gaps only among several plans
    found: dict[str, list[Placed]] = {}
    for parts in writers:
        for part in parts:
            found.setdefault(part.key, []).append(part)
    return {
        key: Stored(
            dtype=parts[0].dtype,
            size=parts[0].size,
            pieces=tuple(sorted((part.start, part.length, part.file) for part in parts)),
        )
        for key, parts in found.items()
    }


def write_item(part: Placed) -> WriteItem:
    """Return a part in the form that torch's planner takes."""
    offsets = Size([part.start])
    return WriteItem(
        index=MetadataIndex(part.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=Size([part.length])),
            properties=TensorProperties(dtype=dtype_named(part.dtype)),
            size=Size([part.size]),
        ),
    )


class CheckpointReader:
    """The tensors of a checkpoint. A caller reads only the elements it needs."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record
        self.metadata: Metadata = record.metadata()
        self.blocks = BlockReader(folder, record.files, record.block)
        self._places: dict[str, dict[str, tuple[int, int]]] = {}
        self._begins: dict[tuple[str, str], tuple[dict[int, int], int]] = {}

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the parts' tensors. Elements are converted to the type of the tensor they go to."""
        for file, wanted in by_file(self.metadata, parts).items():
            for part, item in wanted:
                (first,), (length,), (at,) = item.storage_offsets, item.lengths, item.dest_offsets
                values = self.values(file, part.key, item.storage_index, first, length)
                part.tensor.detach()[at : at + length].copy_(values)

    def values(self, file: str, key: str, piece: MetadataIndex, first: int, length: int) -> Tensor:
        """Read elements of a stored piece: `length` of them from its element `first` on."""
        stored = self.record.tensors[key]
        dtype = dtype_named(stored.dtype)
        begin, end = self.places(file).get(key, (0, -1))
        assert piece.offset is not None
        starts, whole = self._runs(file, key)
        if end - begin != whole * dtype.itemsize:
            raise StorageError(f"{file}: it holds another {key} than the record says")
        raw = torch.empty(length * dtype.itemsize, dtype=torch.uint8)
        at = begin + (starts[piece.offset[0]] + first) * dtype.itemsize
        self.blocks.read(file, at, raw.numpy().data)
        return raw.view(dtype)

    def _runs(self, file: str, key: str) -> tuple[dict[int, int], int]:
        """Return where each piece of a tensor begins in a file, by its offset, and the length of all."""
        if (file, key) not in self._begins:
            starts, end = dict[int, int](), 0
            for offset, length, name in sorted(self.record.tensors[key].pieces):
                if name == file:
                    starts[offset], end = end, end + length
            self._begins[file, key] = starts, end
        return self._begins[file, key]

    def places(self, file: str) -> dict[str, tuple[int, int]]:
        """Return which bytes of a file hold each tensor of it."""
        if file not in self._places:
            self._places[file] = self._header(file)
        return self._places[file]

    def _header(self, file: str) -> dict[str, tuple[int, int]]:
        head = bytearray(8)
        self.blocks.read(file, 0, memoryview(head))
        length = int.from_bytes(head, "little")
        if length > min(LONGEST, self.record.files[file].size - 8):
            raise StorageError(f"{file}: its header is longer than the file")
        text = bytearray(length)
        self.blocks.read(file, 8, memoryview(text))
        begin, size = 8 + length, self.record.files[file].size
        found: dict[str, tuple[int, int]] = {}
        try:
            for key, entry in json.loads(text).items():
                if key != "__metadata__":
                    low, high = (begin + int(offset) for offset in entry["data_offsets"])
                    if not begin <= low <= high <= size:
                        raise ValueError(f"{key} lies outside the file")
                    found[key] = (low, high)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StorageError(f"{file}: its header cannot be read: {error}") from error
        return found

    def check_headers(self) -> None:
        """Refuse files that hold other tensors than the record lists."""
        listed: dict[str, dict[str, int]] = {file: {} for file in self.record.files}
        for key, stored in self.record.tensors.items():
            for _, length, file in stored.pieces:
                size = length * dtype_named(stored.dtype).itemsize
                listed[file][key] = listed[file].get(key, 0) + size
        for file, wanted in listed.items():
            held = {key: high - low for key, (low, high) in self.places(file).items()}
            if held != wanted:
                differ = sorted(
                    key for key in held.keys() | wanted.keys() if held.get(key) != wanted.get(key)
                )
                raise StorageError(f"{file}: it holds another {differ[0]} than the record says")

    def verify(self) -> None:
        """Verify every byte of every file."""
        self.blocks.verify()
        self.check_headers()


def by_file(metadata: Metadata, parts: Iterable[Part]) -> Mapping[str, list[tuple[Part, ReadItem]]]:
    """Return, for each file, the runs of its stored pieces to read and the part that each belongs to."""
    found: dict[str, list[tuple[Part, ReadItem]]] = {}
    for part in parts:
        for item in reads(metadata, part):
            found.setdefault(metadata.storage_data[item.storage_index], []).append((part, item))
    return found


def reads(metadata: Metadata, part: Part) -> Iterator[ReadItem]:
    """Yield the runs of stored pieces that fill a part."""
    length = part.tensor.numel()
    if not length:
        return
    stored = metadata.state_dict_metadata.get(part.key)
    if not isinstance(stored, TensorStorageMetadata) or stored.size != Size([part.size]):
        size = stored.size.numel() if isinstance(stored, TensorStorageMetadata) else 0
        raise StorageError(f"the record has {size} elements of {part.key}, not {part.size}")
    chunk = ChunkStorageMetadata(offsets=Size([part.start]), sizes=Size([length]))
    items = create_read_items_for_chunk_list(part.key, stored, [chunk])
    assert sum(item.lengths[0] for item in items) == length, f"{part.key} is not whole"
    yield from items
