"""The key that the processes of a torchrun job prove to each other that they know.

torchrun's own store is open to every process that reaches its port, so the key is never in it. It comes from
the environment that the launcher gives every rank, or from a file that only this user can read.
"""

import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piper.errors import ConfigError, LaunchError
from piper.launchers.world import RankEnvironment
from piper.private_files import private_folder, read_private, write_private

KEY = "PIPER_KEY"
KEY_FILE = "PIPER_KEY_FILE"
RUNTIME = "XDG_RUNTIME_DIR"
LEAST = 32  # characters of a key
LAUNCH = re.compile(r"[0-9a-f]{32}")  # a name of a launch, as `new_launch` makes it
STALE = 24 * 3600.0  # seconds after which the key of a launch that was killed is removed
HOW = (
    "give every rank the same 32 or more random characters in PIPER_KEY (openssl rand -hex 32), or in a "
    "file of mode 0600 that PIPER_KEY_FILE names"
)


def given_key() -> bytes | None:
    """Return the key that the environment gives: PIPER_KEY, or the contents of PIPER_KEY_FILE."""
    text = os.environ.get(KEY)
    if text is None and (path := os.environ.get(KEY_FILE)) is not None:
        try:
            text = read_private(Path(path), "launch").decode(errors="replace")
        except FileNotFoundError as error:
            raise ConfigError(
                "there is no key file",
                by="launch",
                facts={KEY_FILE: path},
                hint="put it where every rank can read it, with mode 0600",
            ) from error
    if text is None:
        return None
    if len(text.strip()) < LEAST:
        raise ConfigError(
            f"the key is shorter than {LEAST} characters",
            by="launch",
            facts={"length": str(len(text.strip()))},
            hint=HOW,
        )
    return text.strip().encode()


def new_launch() -> str:
    """Return a new name for a launch. It is no secret."""
    return secrets.token_hex(16)


def runtime_folder() -> Path:
    """Return the folder of this user in which the keys of running launches lie."""
    runtime = os.environ.get(RUNTIME)
    if runtime and os.access(runtime, os.W_OK):
        return private_folder(Path(runtime) / "piper", "launch")
    return private_folder(Path(tempfile.gettempdir()) / f"piper-{os.geteuid()}", "launch")


@contextmanager
def offered_key(launch: str) -> Iterator[bytes]:
    """Make a key that other processes of this user on this machine can fetch inside the block."""
    folder = runtime_folder()
    _remove_stale(folder)
    path, key = folder / launch, secrets.token_bytes(32)
    write_private(path, key)
    try:
        yield key
    finally:
        path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    for path in folder.iterdir():
        try:
            if LAUNCH.fullmatch(path.name) and time.time() - path.stat().st_mtime > STALE:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster


def fetched_key(launch: str, rank: int) -> bytes:
    """Return the key that rank 0 of a launch has made on this machine."""
    try:
        if LAUNCH.fullmatch(launch):
            return read_private(runtime_folder() / launch, "launch")
    except FileNotFoundError:
        pass
    raise LaunchError(
        "this rank does not have the key of the launch",
        by=f"rank {rank}",
        facts={"why": "rank 0 made one in a file of its own machine and user, and it is not here"},
        hint=HOW,
    )


def check_key(world: RankEnvironment) -> None:
    """Refuse to launch on several machines without a key that all ranks have."""
    if not world.one_machine and given_key() is None:
        raise key_missing(world.rank)


def key_missing(rank: int) -> LaunchError:
    """Return the error of ranks on several machines that have no key in common."""
    return LaunchError(
        "ranks on several machines need a key",
        by=f"rank {rank}",
        facts={
            "why": "each proves to the others that it knows one, and torchrun's store is open to everybody"
        },
        hint=HOW,
    )
