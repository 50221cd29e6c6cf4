"""The rendezvous of the ranks of a torchrun job, and the key that they prove to know.

torch's store holds the address of the driver of each launch. It is open to every process that reaches its
port, so the key is never in it: that comes from the environment, or from a file that only this user can read.
"""

import json
import os
import re
import secrets
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from piper.errors import ConfigError, LaunchError
from piper.process.files import private_folder, read_private, write_private
from piper.workers.rank_environment import RankEnvironment
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import kept_alive

LOOPBACK = "127.0.0.1"
KEY = "PIPER_KEY"
KEY_FILE = "PIPER_KEY_FILE"
RUNTIME = "XDG_RUNTIME_DIR"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started all ranks again
LEAST = 32  # characters of a key
LAUNCH = re.compile(r"[0-9a-f]{32}")  # a name of a launch: `secrets.token_hex(16)`, which is no secret
HOW = (
    "give every rank the same 32 or more random characters in PIPER_KEY (openssl rand -hex 32), or in a "
    "file of mode 0600 that PIPER_KEY_FILE names"
)
END = "end"  # the exit code of rank 0, set when it launches nothing any more
LEFT = "left"  # how many ranks have read it
LOST = (dist.DistStoreError, dist.DistNetworkError)  # the store does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverAddress:
    """The address at which the driver of a launch accepts workers. It is public, so it holds no secret."""

    host: str
    port: int
    launch: str  # the name of the launch, under which its key is found. Empty: the environment gives the key
    spares: bool  # a rank that is asked to end is replaced, and does not end the run


@cache  # a process is in one world; rank 0 keeps the store that all meet at, unless torchrun does
def store_of(world: RankEnvironment) -> Store:
    """Return the store of a job."""
    try:
        with kept_alive():  # torch waits for the store's answer without limit
            met = next(
                rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=TIMEOUTS.meeting))
            )
    except LOST as error:
        raise apart(world, str(error)) from error
    store = PrefixStore(prefix(), cast(Store, met[0]))
    if world.leads:
        weakref.finalize(store, end_script, world)  # at the end of this process
    return store


def prefix() -> str:
    """Return what the keys of this start of the ranks begin with: the store of torchrun outlives ranks."""
    return f"piper/{os.environ.get(RESTARTS, '0')}"


def apart(world: RankEnvironment, why: str) -> LaunchError:
    """Return the error of processes that do not find each other."""
    return LaunchError(
        "the processes of this world do not find each other",
        by=f"rank {world.rank}",
        facts={"at": f"{world.address}:{world.port}", "why": why.splitlines()[0]},
        hint="start every rank of WORLD_SIZE, with a MASTER_ADDR and MASTER_PORT that all can reach",
    )


def own_address(world: RankEnvironment) -> str:
    """Return the address at which the other processes reach this one."""
    if world.one_machine:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((world.address, world.port))  # sends nothing, but chooses an interface
        return cast(str, way.getsockname()[0])


def publish_address(world: RankEnvironment, address: DriverAddress) -> None:
    """Write the address of this process's next launch into the store."""
    store = store_of(world)
    store.set(f"launch/{store.add('launches', 1)}", json.dumps(asdict(address)))


def read_address(world: RankEnvironment, text: bytes) -> DriverAddress:
    """Return the address that the store holds. Any process could have written it, so it is checked."""
    try:
        address = DriverAddress(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise apart(world, f"the store holds no address: {error}") from error
    if [*map(type, astuple(address))] != [str, int, str, bool]:
        raise apart(world, "the store holds no address")
    return address


def addresses(world: RankEnvironment, leaves: Callable[[], bool]) -> Iterator[DriverAddress]:
    """Yield the address of every launch, until rank 0 launches no more or is gone.

    leaves: whether this rank is to end. Then it waits a moment for rank 0 to do so first.
    """
    launch, since = 1, None
    try:
        store = store_of(world)
        while True:
            if store.check([f"launch/{launch}"]):
                yield read_address(world, store.get(f"launch/{launch}"))
                launch += 1
                continue
            if store.check([END]):
                return
            if since is None and leaves():
                since = time.monotonic()
            if since is not None and time.monotonic() - since > TIMEOUTS.ranks_leave:
                raise lost_leader(world)
            time.sleep(TIMEOUTS.rank_poll)
    except (*LOST, RuntimeError):  # the store went with rank 0
        return


def ending(world: RankEnvironment) -> int:
    """Return the exit code of a rank that has no launch to wait for any more.

    The launcher of a machine sees its own ranks only. So a failure is reported on the other machines too; on
    its own, rank 0 reports it, and no rank may end with an error before rank 0 has done so.
    """
    try:
        code = int(store_of(world).get(END))
        store_of(world).add(LEFT, 1)
    except (*LOST, RuntimeError) as error:
        raise lost_leader(world) from error
    near = world.rank == world.local  # ranks are counted machine by machine
    return 0 if near else code


def lost_leader(world: RankEnvironment) -> LaunchError:
    """Return the error of a rank whose rank 0 is gone."""
    return LaunchError(
        "rank 0 is gone, or cannot be reached any more",
        by=f"rank {world.rank}",
        facts={
            "at": f"{world.address}:{world.port}",
            "lost": "the steps since the newest checkpoint: rank 0 drives, and no other rank takes its place",
        },
        hint="look at what rank 0 says; start all ranks again with --resume to go on from that checkpoint",
    )


@contextmanager
def leading(world: RankEnvironment) -> Iterator[None]:
    """Launch inside the block, and end the other ranks after it, with the exit code of this one."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    finally:
        end_ranks(world, code)


def end_ranks(world: RankEnvironment, code: int) -> None:
    """Let the other ranks end, with the exit code of this one, and wait a moment until they know."""
    store = store_of(world)
    store.set(END, str(code))
    until = time.monotonic() + (0 if code else TIMEOUTS.ranks_leave)  # of a failed run, ranks may be lost
    while store.add(LEFT, 0) < world.size - 1 and time.monotonic() < until:
        time.sleep(TIMEOUTS.rank_poll)  # the store may end with this process


def end_script(world: RankEnvironment) -> None:
    """Let the other ranks end with a script, where `leading` has not."""
    with suppress(*LOST, RuntimeError):  # the store went first
        if not store_of(world).check([END]):
            end_ranks(world, int(hasattr(sys, "last_value")))  # an error that ends a script is the last one


def store_on(address: str) -> TCPStore:
    """Return a new store that listens on this address only."""
    with socket.socket() as listening:
        listening.bind((address, 0))
        listening.listen(128)
        return TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUTS.meeting),
            master_listen_fd=listening.detach(),
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
    for stale in folder.iterdir():
        with suppress(FileNotFoundError):  # another process was faster
            if LAUNCH.fullmatch(stale.name) and time.time() - stale.stat().st_mtime > TIMEOUTS.key_stale:
                stale.unlink()
    path, key = folder / launch, secrets.token_bytes(32)
    write_private(path, key)
    try:
        yield key
    finally:
        path.unlink(missing_ok=True)


def fetched_key(launch: str, rank: int) -> bytes:
    """Return the key that rank 0 of a launch has made on this machine."""
    with suppress(FileNotFoundError):
        if LAUNCH.fullmatch(launch):
            return read_private(runtime_folder() / launch, "launch")
    raise LaunchError(
        "this rank does not have the key of the launch",
        by=f"rank {rank}",
        facts={"why": "rank 0 made one in a file of its own machine and user, and it is not here"},
        hint=HOW,
    )


def key_of(world: RankEnvironment, address: DriverAddress) -> bytes:
    """Return the key of a launch: the one that the environment gives, or the one that rank 0 made."""
    key = given_key()
    return fetched_key(address.launch, world.rank) if key is None or address.launch else key


def check_key(world: RankEnvironment) -> None:
    """Refuse to launch on several machines without a key that all ranks have."""
    if not world.one_machine and given_key() is None:
        raise LaunchError(
            "ranks on several machines need a key",
            by=f"rank {world.rank}",
            facts={"why": "each proves that it knows one, and torchrun's store is open to every process"},
            hint=HOW,
        )
