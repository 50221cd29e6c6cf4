"""What a checkpoint says of itself: `checkpoint.json`, beside the files that hold its tensors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from piper.checkpoint.plain import Plain, dtype_named
from piper.errors import ConfigError

FILE = "checkpoint.json"
FORMAT, VERSION = "piper checkpoint", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parameter or buffer: its full shape and exact type. None: not known, and not compared."""

    shape: tuple[int, ...]
    dtype: str | None = None
    trainable: bool | None = None

    def __str__(self) -> str:
        kind = {True: " trained", False: " frozen", None: ""}[self.trainable]
        return f"{list(self.shape)} {self.dtype or 'of any type'}{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """How parameters change: the optimizer and scheduler by name, with their settings."""

    optimizer: str | None = None
    groups: Plain = None
    scheduler: str | None = None
    schedule: Plain = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor on disk: flat pieces, each as (offset, length, file)."""

    dtype: str
    size: int  # elements in all
    pieces: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything a checkpoint holds except the tensors' elements."""

    step: int
    seed: int | None = None  # None: values only, of no particular run
    trainer: Trainer = field(default_factory=Trainer)
    data: Plain = None
    model: Mapping[str, Spec] = field(default_factory=dict)  # parameters and buffers
    moments: Mapping[str, Mapping[str, tuple[int, ...] | None]] = field(default_factory=dict)
    # ^ the optimizer's tensors: parameter -> key -> shape; None: one element for each of the parameter's
    numbers: Mapping[str, Plain] = field(default_factory=dict)  # its other state, by parameter
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)  # each file's bytes

    def to_json(self) -> str:
        """As text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}) + "\n"

    def metadata(self) -> Metadata:
        """As torch.distributed.checkpoint describes a checkpoint."""
        tensors = {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_named(stored.dtype)),
                size=Size([stored.size]),
                chunks=[
                    ChunkStorageMetadata(offsets=Size([offset]), sizes=Size([length]))
                    for offset, length, _ in stored.pieces
                ],
            )
            for key, stored in self.tensors.items()
        }
        files = {
            MetadataIndex(key, [offset]): file
            for key, stored in self.tensors.items()
            for offset, _, file in stored.pieces
        }
        return Metadata(state_dict_metadata=dict(tensors), storage_data=files)


def read_record(folder: Path) -> Record:
    """What a checkpoint says of itself, after a look at whether all of it is there."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            "there is no complete checkpoint here",
            by="load",
            facts={"path": str(folder), "missing": FILE},
            hint="give the folder of one checkpoint, such as the newest that latest(folder) finds",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(folder, f"{FILE}: {error}") from error
    record = parse(folder, text)
    for name, size in record.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            had = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise unreadable(folder, f"{name} {had}")
    return record


def unreadable(folder: Path, why: str) -> ConfigError:
    """The error of a checkpoint that is damaged."""
    return ConfigError(
        "this checkpoint is damaged",
        by="load",
        facts={"path": str(folder), "why": why},
        hint="load an earlier one; a save that is interrupted never leaves one like this",
    )


def parse(folder: Path, text: str) -> Record:
    """A record from its text, each field of the kind it should be."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        if found["version"] != VERSION:
            raise ValueError(f"it has version {found['version']!r}, and this Piper reads version {VERSION}")
        return record_of(found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(folder, f"{FILE}: {type(error).__name__}: {error}") from error


def record_of(found: Mapping[str, object]) -> Record:
    """The record in a JSON object."""
    files = {plain_name(name): int(size) for name, size in table(found, "files").items()}
    tensors = {
        key: Stored(
            dtype=str(stored["dtype"]),
            size=int(stored["size"]),
            pieces=tuple((int(a), int(n), plain_name(f)) for a, n, f in stored["pieces"]),
        )
        for key, stored in table(found, "tensors").items()
    }
    for stored in tensors.values():
        dtype_named(stored.dtype)
        covered(stored)
        for _, _, file in stored.pieces:
            files[file]
    trainer = table(found, "trainer")
    seed = found["seed"]
    return Record(
        step=int(cast(int, found["step"])),
        seed=None if seed is None else int(cast(int, seed)),
        trainer=Trainer(**{name: trainer[name] for name in Trainer.__slots__}),
        data=cast(Plain, found["data"]),
        model={
            name: Spec(shape=tuple(s["shape"]), dtype=s["dtype"], trainable=s["trainable"])
            for name, s in table(found, "model").items()
        },
        moments={
            name: {key: None if shape is None else tuple(shape) for key, shape in keys.items()}
            for name, keys in table(found, "moments").items()
        },
        numbers=table(found, "numbers"),
        tensors=tensors,
        files=files,
    )


def table(found: Mapping[str, object], name: str) -> dict[str, Any]:
    """A field that is an object."""
    value = found[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    return value


def plain_name(name: str) -> str:
    """The name of a file in the checkpoint's own folder, and nowhere else."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


def covered(stored: Stored) -> None:
    """Every element of a tensor lies in one piece."""
    end = 0
    for offset, length, _ in sorted(stored.pieces):
        if offset != end or length < 0:
            raise ValueError(f"a tensor has a gap or an overlap at element {end}")
        end = offset + length
    if end != stored.size:
        raise ValueError(f"a tensor of {stored.size} elements ends at {end}")
