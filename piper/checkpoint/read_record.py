"""Reads the record of a checkpoint, and refuses one whose text or files are not what was written."""

import json
from pathlib import Path

from piper.checkpoint.metadata import FILE, FORMAT, OURS, UNSIGNED, VERSION, DamagedError, Record, record_of
from piper.checkpoint.verified_files import digest_of
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
