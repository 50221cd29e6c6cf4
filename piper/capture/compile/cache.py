"""Keeps compiled code in a folder of this user, and gives back only what this user's key has signed.

Compiled code is read by unpickling it and by loading shared libraries: to read it is to run it. An entry
names every file that belongs to it with a digest, and carries an HMAC under a key that lies outside the
folder. An entry that does not agree is treated as absent. Compilers never read the folder: the files of an
entry are written, after they are verified, to a working folder of the process.
"""

import atexit
import hashlib
import hmac
import json
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from piper.errors import ConfigError
from piper.process.files import private_folder, user_key
from piper.process.process_table import stat_field

CACHE = Path("~/.cache/piper")  # expanded where it is used, on the machine that uses it
KEY = Path("~/.config/piper/cache.key")
_BY = "cache"
_DIGEST = hashlib.sha256().digest_size
_LABEL = b"piper cache entry 1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """Compiled code, and the files that loading it would otherwise have to compile."""

    artifact: bytes
    files: Mapping[str, bytes]  # by path within a working folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder of entries. Each is complete or absent, where many processes write, or one dies as it does."""

    folder: Path = CACHE
    key: Path = KEY

    def find(self, name: str) -> CacheEntry | None:
        """Return an entry. None: there is none, or it is not as this user wrote it."""
        folder = self._root()
        try:
            stored = (folder / "chunks" / name[:2] / name).read_bytes()
        except OSError:
            return None
        digest, manifest = stored[:_DIGEST], stored[_DIGEST:]
        signed = hmac.compare_digest(digest, self._sign(name, manifest))
        listed: dict[str, str] = json.loads(manifest) if signed else {}
        contents = {path: self._blob(folder, blob) for path, blob in listed.items()}
        files = {path: content for path, content in contents.items() if content is not None}
        if not files or len(files) < len(listed):
            path = self.folder / "chunks" / name[:2] / name
            warnings.warn(f"{path} is damaged: the code is compiled again", stacklevel=2)
            return None
        return CacheEntry(artifact=files.pop(""), files=files)

    def empty(self) -> bool:
        """Return whether nothing has been stored yet."""
        return not (self._root() / "chunks").exists()

    def keep(self, name: str, entry: CacheEntry) -> None:
        """Write an entry, in place of one of the same name."""
        folder, listed = self._root(), dict[str, str]()
        for path, content in {"": entry.artifact, **entry.files}.items():
            listed[path] = hashlib.sha256(content).hexdigest()
            if self._blob(folder, listed[path]) is None:
                _write(folder / "files" / listed[path][:2] / listed[path], content)
        manifest = json.dumps(listed, sort_keys=True).encode()
        _write(folder / "chunks" / name[:2] / name, self._sign(name, manifest) + manifest)

    def working_folder(self) -> Path:
        """Return the folder of this process in which a compiler may write. The next process removes it."""
        parent = private_folder(self._root() / "work", _BY)
        own = parent / _process_name(os.getpid())
        if not own.exists():
            _remove_abandoned(parent)
            own.mkdir(mode=0o700, exist_ok=True)
        return own

    def restore(self, entry: CacheEntry) -> Path:
        """Write the files of an entry to the working folder of this process, and return that folder."""
        folder = self.working_folder()
        for path, content in entry.files.items():
            assert ".." not in PurePosixPath(path).parts and not PurePosixPath(path).is_absolute(), path
            target = folder / path
            if not target.exists():  # what is there was written by this process
                _write(target, content)
        return folder

    def _root(self) -> Path:
        return private_folder(self.folder.expanduser(), _BY)

    def _sign(self, name: str, manifest: bytes) -> bytes:
        key = user_key(self.key.expanduser(), _BY)
        return hmac.digest(key, _LABEL + name.encode() + b"\0" + manifest, "sha256")

    def _blob(self, folder: Path, digest: str) -> bytes | None:
        try:
            content = (folder / "files" / digest[:2] / digest).read_bytes()
        except OSError:
            return None
        return content if hashlib.sha256(content).hexdigest() == digest else None


def _write(path: Path, content: bytes) -> None:
    """Write a file that is either whole or as it was before."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, unnamed = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(unnamed).replace(path)
        finally:
            Path(unnamed).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "the cache cannot be written",
            by=_BY,
            facts={"path": str(path), "why": str(error)},
            hint="free some space, or name another folder: compile(job, cache=...)",
        ) from error


def _process_name(pid: int) -> str:
    """Return a name for a process that no other process has, now or later: with when it started."""
    return f"{socket.gethostname()}-{pid}-{stat_field(pid, 19) or 0}"


def _remove_abandoned(parent: Path) -> None:
    """Remove the working folders of processes of this machine that have ended."""
    for path in parent.iterdir():
        host, _, rest = path.name.partition(f"{socket.gethostname()}-")
        pid = rest.partition("-")[0]
        if not host and pid.isdecimal() and path.name != _process_name(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def usable_cache(folder: Path) -> Cache:
    """Return the cache in a folder. One that cannot be written is replaced by one for this process alone."""
    try:
        there = folder.expanduser()
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = KEY.expanduser().parent
        keys.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=there), tempfile.TemporaryFile(dir=keys):
            return Cache(folder=folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        warnings.warn(
            f"the cache {folder} cannot be written ({error}), so compiled code is not kept for the next run; "
            "name another folder with compile(job, compile=True, cache=...)",
            stacklevel=3,
        )
        own = Path(tempfile.mkdtemp(prefix="piper-cache-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Cache(folder=own, key=own / "key")
