"""The record of a checkpoint: `checkpoint.json`, next to the files that hold its tensors.

[Note: seal] The record holds a digest of its own text, taken with zeros in place of the digest. So a change
of any byte of it is noticed, as is a change of any byte of the files, whose digests it lists. Sections repeat
each other on purpose: one that was emptied contradicts the rest.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from piper.checkpoint.json_state import Plain, dtype_named
from piper.checkpoint.verified_files import BLOCK, DIGEST, FileRecord, digest_of
from piper.errors import ConfigError

FILE = "checkpoint.json"
SUFFIX = ".safetensors"
OURS = re.compile(r"checkpoint\.json|(?:device-\d+|values-\d+|driver)\.safetensors")  # names in a checkpoint
FORMAT, VERSION = "piper checkpoint", 2
UNSIGNED = "0" * DIGEST  # stands for the digest while it is computed
LARGEST = 2**63  # integers beyond it are no step and no size


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


class OldFormatError(DamagedError):
    """A checkpoint of format version 1, which has no digests."""

    def __init__(self, path: Path) -> None:
        self.path, self.why = path, "it has format version 1"
        ConfigError.__init__(
            self,
            f"this checkpoint has format version 1, and this Piper reads version {VERSION}",
            by="load",
            facts={"path": str(path)},
            hint="load it with Piper at commit 4ce2bcb, the last that reads version 1, and save it again",
        )


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

    def to_json(self) -> str:
        """Return the record as text that holds its own digest."""
        fields = asdict(self)
        for key, stored in self.tensors.items():
            fields["tensors"][key]["pieces"] = [piece.as_list() for piece in stored.pieces]
        return seal(fields)


def seal(fields: Mapping[str, object]) -> str:
    """Return the text of a record with these fields, see [Note: seal]."""
    head = {"format": FORMAT, "version": VERSION, "digest": UNSIGNED}
    text = json.dumps({**head, **{k: v for k, v in fields.items() if k not in head}}) + "\n"
    return text.replace(UNSIGNED, digest_of(text.encode()), 1)


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
        found = path.stat().st_size if path.is_file() else None
        if found != file.size:
            had = "is missing" if found is None else f"has {found} bytes, not {file.size}"
            raise DamagedError(folder, f"{name} {had}")
    for path in sorted(folder.iterdir()):
        if OURS.fullmatch(path.name) and path.name not in (FILE, *record.files):
            raise DamagedError(
                folder, f"{path.name} is not a file of this checkpoint: {FILE} does not list it"
            )
    return record


def parse(folder: Path, text: str) -> Record:
    """Read a record from its text; refuse one whose digest, fields or sections do not agree."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        version = found["version"]
        if version == 1:
            raise OldFormatError(folder)
        if version != VERSION:
            raise ValueError(f"it has version {version!r}, and this Piper reads version {VERSION}")
        check_seal(text, found["digest"])
        record = record_of(found)
        check_sections(record)
        return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(folder, f"{FILE}: {type(error).__name__}: {error}") from error


def check_seal(text: str, digest: object) -> None:
    """Refuse a text that is not the one whose digest it holds."""
    if not isinstance(digest, str) or digest_of(text.replace(digest, UNSIGNED, 1).encode()) != digest:
        raise ValueError("its text is not what was written (its digest differs)")


def record_of(found: Mapping[str, Any]) -> Record:
    """Return the record in a JSON object. Check the type of each field."""
    files = {plain_name(name): file_of(file) for name, file in table(found, "files").items()}
    tensors = {
        key: Stored(
            dtype=str(stored["dtype"]),
            size=whole_number(stored["size"], "a size"),
            pieces=tuple(piece_of(*piece) for piece in stored["pieces"]),
        )
        for key, stored in table(found, "tensors").items()
    }
    trainer = table(found, "trainer")
    names = [name for name in Trainer.__slots__ if name != "kept"]
    kept, seed = trainer["kept"], found["seed"]
    if seed is not None and type(seed) is not int:
        raise TypeError(f"seed is {seed!r}, not an integer")
    return Record(
        step=whole_number(found["step"], "step"),
        seed=seed,
        trainer=Trainer(
            **{name: trainer[name] for name in names},
            kept=None if kept is None else {name: tuple(map(str, keys)) for name, keys in kept.items()},
        ),
        data=cast(Plain, found["data"]),
        model={name: spec_of(spec) for name, spec in table(found, "model").items()},
        moments={
            name: {key: None if shape is None else shape_of(shape) for key, shape in keys.items()}
            for name, keys in table(found, "moments").items()
        },
        numbers={name: table(table(found, "numbers"), name) for name in table(found, "numbers")},
        tensors=tensors,
        files=files,
        block=whole_number(found["block"], "block"),
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


def spec_of(found: Mapping[str, Any]) -> Spec:
    """Return the spec of a parameter or buffer."""
    if found["dtype"] is not None:
        dtype_named(found["dtype"])
    if not (found["trainable"] is None or isinstance(found["trainable"], bool)):
        raise TypeError(f"trainable is {found['trainable']!r}")
    return Spec(shape=shape_of(found["shape"]), dtype=found["dtype"], trainable=found["trainable"])


def file_of(found: Mapping[str, Any]) -> FileRecord:
    """Return the record of a file."""
    digests = tuple(found["digests"])
    if not all(isinstance(digest, str) and len(digest) == DIGEST for digest in digests):
        raise ValueError("a digest of a file is not one")
    return FileRecord(size=whole_number(found["size"], "the size of a file"), digests=digests)


def table(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that must be a JSON object."""
    value = found[name]
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


def check_sections(record: Record) -> None:
    """Refuse a record whose sections contradict each other: each tensor is whole, listed and of its type."""
    check_files(record)
    for key, stored in record.tensors.items():
        check_pieces(record, key, stored)
        covered(stored)
        if len({(piece.offset, piece.file) for piece in stored.pieces}) != len(stored.pieces):
            raise ValueError(f"{key} lies twice in one file")
    wanted = {f"model.{name}": spec for name, spec in record.model.items()}
    for key, spec in wanted.items():
        check_size(record, key, spec.shape)
        found = record.tensors.get(key)
        if found is not None and spec.dtype not in (None, found.dtype):
            raise ValueError(f"{key} is stored as {found.dtype}, and its type is {spec.dtype}")
    states = {f"optimizer.{name}.{key}" for name, keys in record.moments.items() for key in keys}
    for name, keys in record.moments.items():
        for key, shape in keys.items():
            check_size(
                record, f"optimizer.{name}.{key}", record.model[name].shape if shape is None else shape
            )
    if extra := sorted(record.tensors.keys() - wanted.keys() - states):
        raise ValueError(f"{extra[0]} is stored, and no section lists it")
    check_trainer_section(record)


def check_pieces(record: Record, key: str, stored: Stored) -> None:
    """Refuse pieces whose runs are empty or overlap, or that are larger than their file."""
    width = dtype_named(stored.dtype).itemsize
    for piece in stored.pieces:
        if piece.count != 1 and not (piece.count and piece.length and piece.stride >= piece.length):
            raise ValueError(f"{key} has a piece of {piece.count} runs that are empty or overlap")
        if piece.elements * width > record.files[piece.file].size:
            raise ValueError(f"{key} has a piece that is larger than {piece.file}")


def check_files(record: Record) -> None:
    """Refuse files that no tensor lies in, tensors without a file, and files with too few digests."""
    used = {piece.file for stored in record.tensors.values() for piece in stored.pieces}
    if differ := sorted(used ^ record.files.keys()):
        raise ValueError(
            f"{differ[0]} is {'listed' if differ[0] in record.files else 'used'} and not the other"
        )
    if record.block < 1:
        raise ValueError(f"block is {record.block}")
    for name, file in record.files.items():
        if len(file.digests) != -(-file.size // record.block):
            raise ValueError(f"{name} has {len(file.digests)} digests for {file.size} bytes")


def check_size(record: Record, key: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is missing, or has another number of elements than its shape."""
    stored, size = record.tensors.get(key), math.prod(shape)
    if (0 if stored is None else stored.size) != size:
        raise ValueError(f"{key} has {0 if stored is None else stored.size} elements, not {size}")


def check_trainer_section(record: Record) -> None:
    """Refuse optimizer or scheduler state without its settings, and optimizer state with values missing."""
    trainer = record.trainer
    if (trainer.optimizer is None) != (trainer.groups is None):
        raise ValueError("trainer has an optimizer or its groups, and not both")
    if (trainer.scheduler is None) != (trainer.schedule is None):
        raise ValueError("trainer has a scheduler or its state, and not both")
    if trainer.groups is not None and not (isinstance(trainer.groups, list) and all(trainer.groups)):
        raise ValueError("trainer has groups without settings")
    found = kept_by(record.moments, record.numbers)
    if trainer.kept is None and trainer.optimizer is not None:
        raise ValueError("trainer does not list what the optimizer keeps")
    if trainer.kept is not None and dict(trainer.kept) != found:
        differ = sorted(n for n in trainer.kept.keys() | found.keys() if trainer.kept.get(n) != found.get(n))
        raise ValueError(f"the optimizer's state of {differ[0]} is not all there")
    if found and trainer.optimizer is None:
        raise ValueError("it has an optimizer's state and no optimizer")
    for name in record.numbers:
        record.model[name]
    if record.seed is None and (record.step or trainer.optimizer is not None):
        raise ValueError("it is of a run, and has no seed")


def kept_by(
    moments: Mapping[str, Mapping[str, object]], numbers: Mapping[str, Mapping[str, object]]
) -> dict[str, tuple[str, ...]]:
    """Return the names of the values that an optimizer saves for each parameter, in order."""
    return {
        name: tuple(sorted(moments.get(name, {}).keys() | numbers.get(name, {}).keys()))
        for name in sorted(moments.keys() | numbers.keys())
    }


def covered(stored: Stored) -> None:
    """Check that the pieces of a tensor hold every element exactly once."""
    held = sum(piece.elements for piece in stored.pieces)  # before anything of their size is made
    if held != stored.size:
        raise ValueError(f"a tensor of {stored.size} elements has {held} in its pieces")
    if not stored.pieces:
        return
    first, *others = stored.pieces
    if not others and (first.offset, first.count) == (0, 1):  # as most are: without the cost of arrays
        return
    starts = np.concatenate([piece.starts() for piece in stored.pieces])
    lengths = np.concatenate([np.full(piece.count, piece.length) for piece in stored.pieces])
    order = np.lexsort((lengths, starts))  # an empty run comes before the one that begins at its end
    ends = np.cumsum(lengths[order])
    wrong = np.flatnonzero(starts[order] != ends - lengths[order])
    if len(wrong):
        end = int(ends[wrong[0]] - lengths[order][wrong[0]])
        raise ValueError(f"a tensor has a gap or an overlap at element {end}")
