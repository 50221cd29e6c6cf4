"""The record of a checkpoint: `checkpoint.json`, next to the files that hold its tensors, and how it is read.

[Note: seal] The record holds a digest of its own text, taken with zeros in place of the digest. So a change
of any byte of it is noticed, as is a change of any byte of the files, whose digests it lists.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from piper.checkpoint.json_state import Plain
from piper.checkpoint.verified_files import BLOCK, DIGEST, FileRecord, digest_of
from piper.errors import ConfigError
from piper.ir.json_fields import from_json
from piper.ir.sharding import FlatRuns
from piper.version import VERSION as PIPER

FILE = "checkpoint.json"
SUFFIX = ".safetensors"
OURS = re.compile(r"checkpoint\.json|(?:device-\d+|values-\d+|driver)\.safetensors")  # names in a checkpoint
FORMAT, VERSION = "piper checkpoint", 2
UNSIGNED = "0" * DIGEST  # stands for the digest while it is computed


def name_in_group(name: str, group: int) -> str:
    """Return the name of a value in one of the groups that train apart. That of the first is its own name."""
    return f"{name}@group{group}" if group else name


class DamagedError(ConfigError):
    """A checkpoint whose files are not as they were written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            "this checkpoint is damaged",
            by="load",
            facts={"path": str(path), "why": why},
            hint="load an earlier one; a save that is interrupted never leaves one like this",
        )
        self.path, self.why = path, why


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parameter or buffer: its full shape and exact type. None: not known, and not compared."""

    shape: tuple[int, ...]
    dtype: str | None = None
    trainable: bool | None = None
    group: int = 0  # whose value it is, of groups that train apart

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


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SavedPiece:
    """Elements of a flattened tensor that lie end to end in a file: one run, or several at equal distances.

    A slice along the second dimension of a matrix is one piece, with a run for each row.
    """

    offset: int  # of the first run in the tensor
    length: int  # of one run
    file: str
    count: int = 1
    stride: int = 0  # from one run to the next in the tensor; 0: there is one run

    @property
    def elements(self) -> int:
        """Return how many elements all its runs have."""
        return self.length * self.count

    def starts(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return where each run begins in the tensor."""
        return self.offset + np.arange(self.count, dtype=np.int64) * self.stride

    @property
    def runs(self) -> FlatRuns:
        """Return its runs, `here` in the file and `there` in the tensor."""
        several = self.count > 1
        return FlatRuns(
            here=0,
            there=self.offset,
            length=self.length,
            count=self.count,
            here_step=self.length if several else 0,
            there_step=self.stride if several else 0,
        )

    def as_list(self) -> list[int | str]:
        """Return the piece as a record writes it."""
        one: list[int | str] = [self.offset, self.length, self.file]
        return one if self.count == 1 else [*one, self.count, self.stride]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor on disk, in pieces."""

    dtype: str
    size: int  # elements in all
    pieces: tuple[SavedPiece, ...]


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
    numbers: Mapping[str, Mapping[str, Plain]] = field(default_factory=dict)  # its other state, by parameter
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    block: int = BLOCK  # bytes of a file for which there is one digest

    @property
    def values(self) -> dict[str, Spec]:
        """Return the parameters and buffers of the model, without those of other groups that train apart."""
        return {name: spec for name, spec in self.model.items() if not spec.group}

    def to_json(self) -> str:
        """Return the record as text that holds its own digest."""
        fields = asdict(self)
        for spec in fields["model"].values():
            if not spec["group"]:  # as in most jobs
                del spec["group"]
        for key, stored in self.tensors.items():
            fields["tensors"][key]["pieces"] = [piece.as_list() for piece in stored.pieces]
        return seal(fields)


def seal(fields: Mapping[str, object]) -> str:
    """Return the text of a record with these fields, see [Note: seal]."""
    head = {"format": FORMAT, "version": VERSION, "digest": UNSIGNED, "piper": PIPER}
    text = json.dumps({**head, **{k: v for k, v in fields.items() if k not in head}}) + "\n"
    return text.replace(UNSIGNED, digest_of(text.encode()), 1)


def record_of(fields: Mapping[str, Any]) -> Record:
    """Return the record in a JSON object, whose digest says that it is as it was written."""
    for name in fields["files"]:
        plain_name(name)
    record = from_json(Record, fields)
    for name in {piece.file for stored in record.tensors.values() for piece in stored.pieces}:
        plain_name(name)
    return record


def plain_name(name: str) -> str:
    """Return the name of a file. Refuse a path to anywhere but the checkpoint's own folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


def read_record(folder: Path) -> Record:
    """Read the record of a checkpoint, and check that its files are there in full length."""
    try:
        text = (folder / FILE).read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            "there is no complete checkpoint here",
            by="load",
            facts={"path": str(folder), "missing": FILE},
            hint="give the folder of one checkpoint, such as the newest that latest(folder) finds",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(folder, f"{FILE}: {error}") from error
    record = parse(folder, text)
    for name, file in record.files.items():
        path = folder / name
        nbytes = path.stat().st_size if path.is_file() else None
        if nbytes != file.size:
            had = "is missing" if nbytes is None else f"has {nbytes} bytes, not {file.size}"
            raise DamagedError(folder, f"{name} {had}")
    for path in sorted(folder.iterdir()):
        if OURS.fullmatch(path.name) and path.name not in (FILE, *record.files):
            raise DamagedError(
                folder, f"{path.name} is not a file of this checkpoint: {FILE} does not list it"
            )
    return record


def parse(folder: Path, text: str) -> Record:
    """Read a record from its text; refuse one whose digest or fields do not agree."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        version = fields["version"]
        if version != VERSION:
            raise ValueError(f"it has version {version!r}, and this Piper reads version {VERSION}")
        digest = fields["digest"]
        if not isinstance(digest, str) or digest_of(text.replace(digest, UNSIGNED, 1).encode()) != digest:
            raise ValueError("its text is not what was written (its digest differs)")
        return record_of(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(folder, f"{FILE}: {type(error).__name__}: {error}") from error
