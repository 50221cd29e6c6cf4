"""Tensors on disk: flat pieces of them in safetensors files, read and written in any other cut.

torch.distributed.checkpoint decides which stored pieces meet which wanted ones, and whether the pieces of all
workers make whole tensors. Its own files are not used: their index is a pickle, which may run code when it is
read. Pieces lie in safetensors files instead, and the index in JSON.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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

from piper.checkpoint.plain import dtype_named
from piper.checkpoint.record import Record, Stored

SUFFIX = ".safetensors"


class StorageError(Exception):
    """A file of a checkpoint that cannot be read or written, in words."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Some elements of a tensor: `tensor`, flat, which begins at `start` of the `size` elements in all."""

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


def write_parts(folder: Path, name: str, parts: Sequence[Part]) -> list[Placed]:
    """Write parts into one file, which is on the disk when this returns. No two may share memory."""
    if not parts:
        return []
    file = name + SUFFIX
    tensors = {part.key: part.tensor for part in parts}
    assert len(tensors) == len(parts), "a worker holds one run of a tensor"
    try:
        save_file(tensors, folder / file)
        sync(folder / file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file}: {error}") from error
    return [
        Placed(
            key=part.key,
            dtype=str(part.tensor.dtype).removeprefix("torch."),
            size=part.size,
            start=part.start,
            length=part.tensor.numel(),
            file=file,
        )
        for part in parts
    ]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def index_of(placed: Iterable[Sequence[Placed]]) -> dict[str, Stored]:
    """The index of what all workers wrote; torch's planner proves that the parts make whole tensors."""
    writers = [*placed]
    plans = [SavePlan([write_item(part) for part in parts]) for parts in writers]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.create_global_plan([*plans, SavePlan([])])  # it looks for gaps only among several plans
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
    """A part as torch's planner sees it."""
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


class Shelf:
    """The tensors of a checkpoint, of which anyone reads only what is wanted."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record
        self.metadata: Metadata = record.metadata()

    def read(self, parts: Iterable[Part]) -> None:
        """Fill the parts' tensors. Elements are converted to the type of the tensor they go to."""
        for file, wanted in by_file(self.metadata, parts).items():
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    for part, item in wanted:
                        (first,), (length,), (at,) = item.storage_offsets, item.lengths, item.dest_offsets
                        values = opened.get_slice(part.key)[first : first + length]
                        part.tensor.detach()[at : at + length].copy_(values)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"{file}: {error}") from error


def by_file(metadata: Metadata, parts: Iterable[Part]) -> Mapping[str, list[tuple[Part, ReadItem]]]:
    """Which run of which stored piece goes where in which part, file by file."""
    found: dict[str, list[tuple[Part, ReadItem]]] = {}
    for part in parts:
        for item in reads(metadata, part):
            found.setdefault(metadata.storage_data[item.storage_index], []).append((part, item))
    return found


def reads(metadata: Metadata, part: Part) -> Iterator[ReadItem]:
    """The runs of stored pieces that make up a part."""
    length = part.tensor.numel()
    if not length:
        return
    stored = metadata.state_dict_metadata[part.key]
    assert isinstance(stored, TensorStorageMetadata) and stored.size == Size([part.size]), part.key
    chunk = ChunkStorageMetadata(offsets=Size([part.start]), sizes=Size([length]))
    items = create_read_items_for_chunk_list(part.key, stored, [chunk])
    assert sum(item.lengths[0] for item in items) == length, f"{part.key} is not whole"
    yield from items
