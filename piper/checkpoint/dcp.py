"""Reads folders of torch.distributed.checkpoint (DCP) as data.

[Note: pickles] The index of such a folder is a pickle, and so is each value in it. A pickle can name any
function, which its reader then calls. The index is read by an unpickler that knows the records of DCP and
nothing else, as objects of its own. Values are read by `torch.load(weights_only=True)`, which builds tensors,
numbers, text and containers. Any other name is an error, before anything has been called.
"""

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.checkpoint.huggingface import Lazy, unreadable
from piper.checkpoint.metadata import plain_name
from piper.errors import CONTENT

LARGEST = 2**63  # integers beyond it are no size
METADATA = ".metadata"
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
# What reading a pickle or a file of torch that is not one can raise.
BROKEN = (*CONTENT, pickle.UnpicklingError, OSError, EOFError, RuntimeError, MemoryError, OverflowError)


class MetadataRecord:
    """A record of the index, with any fields. It stands for the class of torch that the pickle names."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state


class MetadataUnpickler(pickle.Unpickler):
    """Reads an index, see [Note: pickles]."""

    def find_class(self, module: str, name: str) -> object:
        """Return what builds a record that a pickle names. Refuse all other names."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("builtins", "getattr"):
            return member
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name in _RECORDS.get(module, ()):
            return type(name, (MetadataRecord,), {})  # of its own: what a pickle does to a class ends here
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record of DCP")


def member(enum: object, name: str) -> MetadataRecord:
    """Return a member of an enum, which Python 3.11.2 pickles as an attribute. Nothing is looked up."""
    if isinstance(enum, type) and issubclass(enum, MetadataRecord):
        return enum(name)
    raise pickle.UnpicklingError(f"it names an attribute of {enum!r}, which is no record of DCP")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor of a folder, and its pieces by their offsets."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Mapping[tuple[int, ...], tuple[int, ...]]  # offsets -> sizes


class DcpFolder(Lazy):
    """The values of a DCP folder by their flat names, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA).open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            entries = {str(name): entry_of(e) for name, e in metadata.state_dict_metadata.items()}
            self.tensors = {name for name, entry in entries.items() if entry is not None}
            self.items_stored = {
                (str(i.fqn), numbers_of(getattr(i, "offset", ()) or ())): item_of(stored)
                for i, stored in metadata.storage_data.items()
            }
        except BROKEN as error:
            raise unreadable(folder, f"{METADATA}: {error}") from error
        super().__init__({name: partial(self._value, name, entry) for name, entry in entries.items()})

    def _value(self, name: str, entry: DcpTensor | None) -> object:
        """Read a tensor from its pieces, or a value of another kind."""
        try:
            if entry is None:
                return self._stored(name, ())
            whole = torch.empty(entry.shape, dtype=entry.dtype)
            for offsets, sizes in entry.pieces.items():
                piece = self._stored(name, offsets)
                if not isinstance(piece, Tensor) or tuple(piece.shape) != sizes or piece.dtype != entry.dtype:
                    raise ValueError(f"the piece at {list(offsets)} is not what {METADATA} says")
                whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = piece
            return whole
        except BROKEN as error:
            raise unreadable(self.folder, f"{name}: {type(error).__name__}: {error}") from error

    def _stored(self, name: str, offsets: tuple[int, ...]) -> object:
        """Read one value or piece."""
        path, begin, length = self.items_stored[name, offsets]
        with (self.folder / path).open("rb") as file:
            file.seek(begin)
            data = file.read(length)
        if len(data) != length:
            raise ValueError(f"{path} ends before byte {begin + length}")
        value: object = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return value


def entry_of(record: MetadataRecord) -> DcpTensor | None:
    """Return the tensor that a record of the index describes. None: a value of another kind."""
    if type(record).__name__ == "BytesStorageMetadata":
        return None
    fields: Any = record
    entry = DcpTensor(
        dtype=fields.properties.state[0],
        shape=numbers_of(fields.size),
        pieces={numbers_of(chunk.offsets): numbers_of(chunk.sizes) for chunk in fields.chunks},
    )
    if not isinstance(entry.dtype, torch.dtype):
        raise TypeError(f"a dtype is {entry.dtype!r}")
    for offsets, sizes in entry.pieces.items():
        if any(o + s > n for o, s, n in zip(offsets, sizes, entry.shape, strict=True)):
            raise ValueError(f"a piece at {list(offsets)} lies outside {list(entry.shape)}")
    if sum(map(math.prod, entry.pieces.values())) != math.prod(entry.shape):
        raise ValueError(f"the pieces of a tensor of shape {list(entry.shape)} do not make it up")
    return entry


def item_of(record: MetadataRecord) -> tuple[str, int, int]:
    """Return the file of a piece, its offset in bytes and its length. Refuse all but a file of the folder."""
    fields: Any = record
    if getattr(fields, "transform_descriptors", None):
        raise ValueError(f"its pieces are written through {fields.transform_descriptors}, and are not read")
    begin, length = whole_number(fields.offset, "an offset"), whole_number(fields.length, "a length")
    return plain_name(fields.relative_path), begin, length


def whole_number(value: object, what: str) -> int:
    """Return a count: an integer that is not negative and not a bool."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{what} is {value!r}, not a count")
    return value


def numbers_of(values: object) -> tuple[int, ...]:
    """Return a shape or an offset."""
    if not isinstance(values, tuple | list):
        raise TypeError(f"{values!r} is not a shape")
    return tuple(whole_number(value, "a size") for value in values)
