"""The record of a checkpoint: `checkpoint.json`, next to the files that hold its tensors, and how it is read.

It fits a program that has the same parameters and buffers, trained in the same way. Which are trained may
differ: a part that is frozen for a while, or two that take turns.

[Note: seal] The record holds a digest of its own text, taken with zeros in place of the digest. So a change
of any byte of it is noticed, as is a change of any byte of the files, whose digests it lists.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from piper.checkpoint.json_state import Plain
from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel
from piper.ir.format import listed
from piper.ir.json_fields import from_json
from piper.ir.sharding import FlatRuns
from piper.plan.plan import Plans
from piper.version import VERSION as PIPER

FILE = "checkpoint.json"
SUFFIX = ".safetensors"
OURS = re.compile(r"checkpoint\.json|(?:device-\d+|values-\d+|driver)\.safetensors")  # names in a checkpoint
FORMAT, VERSION = "piper checkpoint", 2
BLOCK = 2**22  # bytes of a file for which there is one digest
UNSIGNED = "0" * 2 * hashlib.sha256().digest_size  # stands for the digest while it is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: its bytes, and the digest of each block of them."""

    size: int
    digests: tuple[str, ...]


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of some bytes as text."""
    return hashlib.sha256(data).hexdigest()


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

    @property
    def path(self) -> Path:
        """Return the folder of the checkpoint."""
        return Path(self.facts["path"])

    @property
    def why(self) -> str:
        """Return what is wrong with it."""
        return self.facts["why"]


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
    own: Plain = None  # what the optimizer keeps, but not for a parameter: the same on all devices
    members: Sequence[Sequence[str]] | None = None  # of its groups, where it chose them by values


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SavedPiece:
    """Elements of a flattened tensor, end to end in a file: one run, or several at equal distances."""

    offset: int  # of the first run in the tensor
    length: int  # of one run
    file: str
    count: int = 1
    stride: int = 0  # from one run to the next in the tensor; 0: there is one run

    @property
    def elements(self) -> int:
        """Return how many elements all its runs have."""
        return self.length * self.count

    @property
    def runs(self) -> FlatRuns:
        """Return its runs, `here` in the file and `there` in the tensor."""
        return FlatRuns(
            here=0,
            there=self.offset,
            length=self.length,
            count=self.count,
            here_step=self.length,
            there_step=self.stride,
        )


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
        return seal(as_written(self))


def as_written(part: Any) -> Any:  # noqa: ANN401  what json.dumps takes
    """Return a part of a record in the form in which it is written, or the record."""
    if isinstance(part, SavedPiece):
        run = [part.offset, part.length, part.file]
        return run if part.count == 1 else [*run, part.count, part.stride]
    fields = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
    if isinstance(part, Spec) and not part.group:  # as in most jobs
        del fields["group"]
    return fields


def seal(fields: Mapping[str, object]) -> str:
    """Return the text of a record with these fields, see [Note: seal]."""
    head = {"format": FORMAT, "version": VERSION, "digest": UNSIGNED, "piper": PIPER}
    given = {key: value for key, value in fields.items() if key not in head}
    text = json.dumps({**head, **given}, default=as_written) + "\n"
    return text.replace(UNSIGNED, digest_of(text.encode()), 1)


def plain_name(name: str) -> str:
    """Return the name of a file. Refuse a path to anywhere but the checkpoint's own folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


def read_record(folder: Path) -> Record:
    """Read the record of a checkpoint, and check that its files are there in full length."""
    try:
        text = (folder / FILE).read_bytes().decode("utf-8")
        names = sorted(path.name for path in folder.iterdir())
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
    for name in names:
        if OURS.fullmatch(name) and name not in (FILE, *record.files):
            raise DamagedError(folder, f"{name} is not a file of this checkpoint: {FILE} does not list it")
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
        for name in fields["files"]:
            plain_name(name)
        record = from_json(Record, fields)
        for name in {piece.file for stored in record.tensors.values() for piece in stored.pieces}:
            plain_name(name)
        return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(folder, f"{FILE}: {type(error).__name__}: {error}") from error


def wanted_model(plans: Plans, outline: CapturedModel) -> dict[str, Spec]:
    """Return the parameters and buffers that a program's checkpoint holds, whatever its strategy."""
    buckets = {piece.name: bucket for bucket in plans.buckets.values() for piece in bucket.pieces}
    specs: dict[str, Spec] = {}
    for parameter in outline.parameters:
        spec = Spec(shape=parameter.shape)
        if (bucket := buckets.get(parameter.name)) is not None:
            exact = bucket.precision.sum_dtype if bucket.trainable else bucket.dtype  # of the master copy
            spec = replace(spec, dtype=exact, trainable=bucket.trainable)
        specs[parameter.name] = spec
    read_by_chunks = {name for chunk in outline.chunks for name in chunk.buffers}
    for buffer in outline.buffers:
        if buffer.persistent or buffer.name in read_by_chunks:
            dtype = buffer.dtype if buffer.name in read_by_chunks else None
            specs[buffer.name] = Spec(shape=buffer.shape, dtype=dtype)
    return specs


def check_model(path: Path, record: Record, wanted: Mapping[str, Spec]) -> None:
    """Refuse a checkpoint of another model."""
    missing = [name for name in wanted if name not in record.model]
    unexpected = [name for name in record.values if name not in wanted]
    differ = [
        f"{name}: saved {record.model[name]}, here {spec}"
        for name, spec in wanted.items()
        if name in record.model and not alike(record.model[name], spec)
    ]
    if facts := differences_in(missing, unexpected, differ):
        raise ConfigError(
            "this checkpoint is of another model",
            by="load",
            facts={"path": str(path), **facts},
            hint="load it into the model and precision that it was saved from",
        )


def alike(saved: Spec, here: Spec) -> bool:
    """Return whether a saved value can be loaded: its shape is the same, and its type where it must be."""
    # Where it is trained a parameter has the type of its master copy, frozen that of the computation.
    turned = {saved.trainable, here.trainable} == {True, False}
    known = saved.dtype is not None and here.dtype is not None
    return saved.shape == here.shape and (turned or not known or saved.dtype == here.dtype)


def can_keep(record: Record, name: str) -> bool:
    """Return whether any layout can hold the optimizer's state of a frozen parameter: it goes by element."""
    return not any(record.moments.get(name, {}).values())  # shapes of tensors that go with whole parameters


def changes_in_training(record: Record, wanted: Mapping[str, Spec]) -> str | None:
    """Return in one line what becomes of the optimizer's state where other parameters are trained now."""
    before = {name for name, spec in record.values.items() if spec.trainable}
    trained = {name for name, spec in wanted.items() if spec.trainable}
    if record.seed is None or before == trained:
        return None
    saved = record.moments.keys() | record.numbers.keys()
    begun = [name for name in wanted if name in trained - before]
    unused = [name for name in wanted if name in saved and name not in trained]
    held = [name for name in unused if wanted[name].trainable is not None and can_keep(record, name)]
    lines = {
        "begin with a fresh state of the optimizer": [name for name in begun if name not in saved],
        "go on with the state they had when they were frozen": [name for name in begun if name in saved],
        "are frozen, and later checkpoints keep their state": held,
        "are frozen, and their state is dropped": [name for name in unused if name not in held],
    }
    return "; ".join(f"{len(names)} {what} ({listed(names)})" for what, names in lines.items() if names)


def differences_in(missing: Iterable[str], unexpected: Iterable[str], other: Iterable[str]) -> dict[str, str]:
    """Return the facts of an error about names that differ. Empty: none do."""
    facts = {"missing": listed(missing), "unexpected": listed(unexpected), "other": listed(other, "\n")}
    return {key: text for key, text in facts.items() if text}


def check_trainer(path: Path, record: Record, trainer: Trainer, seed: int) -> None:
    """Refuse a checkpoint that another optimizer, scheduler or seed would not go on from exactly."""
    if record.seed is None:  # values only: every run may start from them
        return
    was = record.trainer
    saved = {"optimizer": was.optimizer, "scheduler": was.scheduler, "seed": record.seed}
    here = {"optimizer": trainer.optimizer, "scheduler": trainer.scheduler, "seed": seed}
    differ = {name: (value, here[name]) for name, value in saved.items() if value != here[name]}
    if differ:
        said = {name: ["none" if value is None else value for value in two] for name, two in differ.items()}
        facts = {name: f"saved {old}, here {new}" for name, (old, new) in said.items()}
        raise ConfigError(
            "this checkpoint comes from a job that trains in another way",
            by="load",
            facts={"path": str(path), **facts},
            hint="go on with the same " + ", ".join(differ) + "; begin a new run from exported weights",
        )
