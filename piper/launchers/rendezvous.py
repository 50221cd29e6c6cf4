"""Where the processes of a world find each other: torch's store, and in it a door for each launch."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from typing import cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from piper.errors import LaunchError
from piper.launchers.messages import PATIENCE
from piper.launchers.store import LOOPBACK
from piper.launchers.world import RankEnvironment

MOST = 4096  # streams of a device that a door may claim
LOOK = 0.2  # seconds between looks at whether there is another launch
END = "end"  # set when rank 0 launches nothing any more
LOST = (dist.DistStoreError, dist.DistNetworkError)  # the store does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverAddress:
    """Where the driver of a launch lets its workers in. Anybody may read it, so it holds no secret."""

    host: str
    port: int
    launch: str  # the name of the launch, under which its key is found. Empty: the environment gives the key
    width: int  # streams of a device, at most


@cache  # a process is in one world; rank 0 keeps the store that all meet at, unless torchrun does
def store_of(world: RankEnvironment) -> Store:
    """The store of a world."""
    try:
        found = next(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=PATIENCE)))
    except LOST as error:
        raise apart(world, str(error)) from error
    return PrefixStore("piper", cast(Store, found[0]))


def apart(world: RankEnvironment, why: str) -> LaunchError:
    """The error of processes that do not find each other."""
    return LaunchError(
        "the processes of this world do not find each other",
        by=f"rank {world.rank}",
        facts={"at": f"{world.address}:{world.port}", "why": why.splitlines()[0]},
        hint="start every rank of WORLD_SIZE, with a MASTER_ADDR and MASTER_PORT that all can reach",
    )


def own_address(world: RankEnvironment) -> str:
    """The address at which the other processes reach this one."""
    if world.one_machine:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((world.address, world.port))  # sends nothing, but chooses an interface
        return cast(str, way.getsockname()[0])


def next_launch(world: RankEnvironment) -> int:
    """The number of this process's next launch: the same on every rank that runs the same script."""
    return store_of(world).add(f"launches/{world.rank}", 1)


def open_door(world: RankEnvironment, launch: int, door: DriverAddress) -> None:
    """Tell the others where to come in."""
    store_of(world).set(f"door/{launch}", json.dumps(asdict(door)))


def find_door(world: RankEnvironment, launch: int) -> DriverAddress:
    """Where to come in, once rank 0 has launched."""
    try:
        return read_door(world, store_of(world).get(f"door/{launch}"))
    except LOST as error:
        raise apart(world, f"rank 0 did not launch within {PATIENCE:g} s") from error


def read_door(world: RankEnvironment, text: bytes) -> DriverAddress:
    """Return the door that the store holds, where anybody could have written it."""
    try:
        found = json.loads(text)
        door = DriverAddress(**found)
    except (ValueError, TypeError) as error:
        raise apart(world, f"the store holds no address: {error}") from error
    kinds = {"host": str, "port": int, "launch": str, "width": int}
    if any(type(found[name]) is not kind for name, kind in kinds.items()) or not 0 < door.width <= MOST:
        raise apart(world, "the store holds no address")
    return door


def doors(world: RankEnvironment) -> Iterator[DriverAddress]:
    """The door of every launch, as they come, until rank 0 says that there will be no more or is gone."""
    launch = 1
    try:
        store = store_of(world)
        while True:
            if store.check([f"door/{launch}"]):
                yield find_door(world, launch)
                launch += 1
            elif store.check([END]):
                return
            else:
                time.sleep(LOOK)
    except (*LOST, RuntimeError):  # the store went with rank 0
        return


@contextmanager
def leading(world: RankEnvironment) -> Iterator[None]:
    """Launch inside; then let the others go."""
    store = store_of(world)
    try:
        yield
    finally:
        store.set(END, "")
