"""The record of a checkpoint: `checkpoint.json`, next to the files that hold its tensors.

[Note: seal] The record holds a digest of its own text, taken with zeros in place of the digest. So a change
of any byte of it is noticed, as is a change of any byte of the files, whose digests it lists. Sections repeat
each other on purpose: one that was emptied contradicts the rest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from piper.checkpoint.json_state import Plain, dtype_named
from piper.checkpoint.verified_files import BLOCK, DIGEST, FileRecord, digest_of
from piper.errors import ConfigError
from piper.ir.sharding import FlatRuns
from piper.version import VERSION as PIPER

FILE = "checkpoint.json"
SUFFIX = ".safetensors"
OURS = re.compile(r"checkpoint\.json|(?:device-\d+|values-\d+|driver)\.safetensors")  # names in a checkpoint
FORMAT, VERSION = "piper checkpoint", 2
UNSIGNED = "0" * DIGEST  # stands for the digest while it is computed
LARGEST = 2**63  # integers beyond it are no step and no size


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
    kept: Mapping[str, tuple[str, ...]] | None = None  # what the optimizer keeps, by parameter. None: unknown


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


def check_seal(text: str, digest: object) -> None:
    """Refuse a text that is not the one whose digest it holds."""
    if not isinstance(digest, str) or digest_of(text.replace(digest, UNSIGNED, 1).encode()) != digest:
        raise ValueError("its text is not what was written (its digest differs)")


def record_of(fields: Mapping[str, Any]) -> Record:
    """Return the record in a JSON object. Check the type of each field."""
    files = {plain_name(name): file_of(file) for name, file in table(fields, "files").items()}
    tensors = {
        key: Stored(
            dtype=str(stored["dtype"]),
            size=whole_number(stored["size"], "a size"),
            pieces=tuple(piece_of(*piece) for piece in stored["pieces"]),
        )
        for key, stored in table(fields, "tensors").items()
    }
    trainer = table(fields, "trainer")
    names = [name for name in Trainer.__slots__ if name != "kept"]
    kept, seed = trainer["kept"], fields["seed"]
    if seed is not None and type(seed) is not int:
        raise TypeError(f"seed is {seed!r}, not an integer")
    return Record(
        step=whole_number(fields["step"], "step"),
        seed=seed,
        trainer=Trainer(
            **{name: trainer[name] for name in names},
            kept=None if kept is None else {name: tuple(map(str, keys)) for name, keys in kept.items()},
        ),
        data=cast(Plain, fields["data"]),
        model={name: spec_of(spec) for name, spec in table(fields, "model").items()},
        moments={
            name: {key: None if shape is None else shape_of(shape) for key, shape in keys.items()}
            for name, keys in table(fields, "moments").items()
        },
        numbers={name: table(table(fields, "numbers"), name) for name in table(fields, "numbers")},
        tensors=tensors,
        files=files,
        block=whole_number(fields["block"], "block"),
    )


def whole_number(value: object, what: str) -> int:
    """Return a count: an integer that is not negative and not a bool."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{what} is {value!r}, not a count")
    return value


def shape_of(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    if not isinstance(value, list):
        raise TypeError(f"a shape is {value!r}, not a list")
    return tuple(whole_number(size, "a dimension") for size in value)


def spec_of(fields: Mapping[str, Any]) -> Spec:
    """Return the spec of a parameter or buffer."""
    if fields["dtype"] is not None:
        dtype_named(fields["dtype"])
    if not (fields["trainable"] is None or isinstance(fields["trainable"], bool)):
        raise TypeError(f"trainable is {fields['trainable']!r}")
    group = whole_number(fields.get("group", 0), "a group")
    return Spec(
        shape=shape_of(fields["shape"]), dtype=fields["dtype"], trainable=fields["trainable"], group=group
    )


def file_of(fields: Mapping[str, Any]) -> FileRecord:
    """Return the record of a file."""
    digests = tuple(fields["digests"])
    if not all(isinstance(digest, str) and len(digest) == DIGEST for digest in digests):
        raise ValueError("a digest of a file is not one")
    return FileRecord(size=whole_number(fields["size"], "the size of a file"), digests=digests)


def table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that must be a JSON object."""
    value = fields[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    return value


def piece_of(offset: object, length: object, file: str, count: object = 1, stride: object = 0) -> SavedPiece:
    """Return a piece that a record lists. Check the type of each field."""
    return SavedPiece(
        offset=whole_number(offset, "an offset"),
        length=whole_number(length, "a length"),
        file=plain_name(file),
        count=whole_number(count, "a count"),
        stride=whole_number(stride, "a stride"),
    )


def plain_name(name: str) -> str:
    """Return the name of a file. Refuse a path to anywhere but the checkpoint's own folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


def kept_by(
    moments: Mapping[str, Mapping[str, object]], numbers: Mapping[str, Mapping[str, object]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the values that an optimizer saves for each parameter, in order."""
    return {
        name: tuple(sorted(moments.get(name, {}).keys() | numbers.get(name, {}).keys()))
        for name in sorted(moments.keys() | numbers.keys())
    }
