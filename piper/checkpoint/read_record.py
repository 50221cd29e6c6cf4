"""Reads the record of a checkpoint, and refuses one whose files or sections contradict each other."""

import json
import math
from pathlib import Path

import numpy as np

from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import (
    FILE,
    FORMAT,
    OURS,
    VERSION,
    DamagedError,
    Record,
    Stored,
    check_seal,
    kept_by,
    record_of,
)
from piper.errors import ConfigError


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
    """Read a record from its text; refuse one whose digest, fields or sections do not agree."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"it is not a {FORMAT}")
        version = fields["version"]
        if version != VERSION:
            raise ValueError(f"it has version {version!r}, and this Piper reads version {VERSION}")
        check_seal(text, fields["digest"])
        record = record_of(fields)
        check_sections(record)
        return record
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(folder, f"{FILE}: {type(error).__name__}: {error}") from error


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
        saved = record.tensors.get(key)
        if saved is not None and spec.dtype not in (None, saved.dtype):
            raise ValueError(f"{key} is stored as {saved.dtype}, and its type is {spec.dtype}")
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
    kept = kept_by(record.moments, record.numbers)
    if trainer.kept is None and trainer.optimizer is not None:
        raise ValueError("trainer does not list what the optimizer keeps")
    if trainer.kept is not None and dict(trainer.kept) != kept:
        differ = sorted(n for n in trainer.kept.keys() | kept.keys() if trainer.kept.get(n) != kept.get(n))
        raise ValueError(f"the optimizer's state of {differ[0]} is not all there")
    if kept and trainer.optimizer is None:
        raise ValueError("it has an optimizer's state and no optimizer")
    for name in record.numbers:
        record.model[name]
    if record.seed is None and (record.step or trainer.optimizer is not None):
        raise ValueError("it is of a run, and has no seed")


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
    starts = np.concatenate([piece.starts() for piece in stored.pieces])
    lengths = np.concatenate([np.full(piece.count, piece.length) for piece in stored.pieces])
    order = np.lexsort((lengths, starts))  # an empty run comes before the one that begins at its end
    ends = np.cumsum(lengths[order])
    wrong = np.flatnonzero(starts[order] != ends - lengths[order])
    if len(wrong):
        end = int(ends[wrong[0]] - lengths[order][wrong[0]])
        raise ValueError(f"a tensor has a gap or an overlap at element {end}")
