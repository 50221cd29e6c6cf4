"""Keeps compiled code in a folder that any number of processes may share."""

import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

CACHE = Path("~/.cache/piper")  # not yet this machine's: it is found where it is used
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder of entries by name. An entry is whole or not there, whoever writes it and whatever happens."""

    folder: Path = CACHE

    @property
    def inductor(self) -> Path:
        """Where Inductor keeps its own files: kernels, and what it compiles them to."""
        return self.folder.expanduser() / "inductor"

    def find(self, name: str) -> bytes | None:
        """An entry, if there is one and it is as it was written."""
        try:
            found = self._path(name).read_bytes()
        except OSError:
            return None
        digest, content = found[:_DIGEST], found[_DIGEST:]
        if hashlib.sha256(content).digest() == digest:
            return content
        warnings.warn(f"{self._path(name)} is damaged: the code is compiled again", stacklevel=2)
        return None

    def keep(self, name: str, content: bytes) -> None:
        """Write an entry; one of the same name gives way at once."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(draft).replace(path)
        except OSError:
            Path(draft).unlink(missing_ok=True)
            raise

    def _path(self, name: str) -> Path:
        return self.folder.expanduser() / "chunks" / name[:2] / name
