"""The ranks of a world that do not drive: each is a worker, and gives its script what rank 0 gets."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import torch
from torch import Tensor

from piper import errors
from piper.errors import LaunchError, PiperError, WorkerError
from piper.launchers.base import Resumed, StepResult, Trains
from piper.launchers.driver import devices_of
from piper.launchers.messages import CODEC, PATIENCE, RankAssignment, RankInfo, RankZeroResult
from piper.launchers.post import BackgroundWorker, Hear
from piper.launchers.processes import SharedFile
from piper.launchers.rendezvous import DriverAddress, doors, find_door, next_launch, own_address
from piper.launchers.transport.channel import ClosedError, connect
from piper.launchers.transport.keys import HOW, check_key, fetched_key, given_key, key_missing
from piper.launchers.transport.shared_memory import HeldValues, ProgressMarks, SharedValues, nameless_file
from piper.launchers.worker_server import WorkerServer
from piper.launchers.world import RankEnvironment, check_size
from piper.runtime.record import Clock, Recording
from piper.runtime.setup import Initial, ProgramLike
from piper.runtime.trail import Mark

CHANGES = ("step", "load")  # what rank 0 may not do without the others noticing


def key_for(world: RankEnvironment, door: DriverAddress) -> bytes:
    """Return the key of a launch: the one that the environment gives, or the one that rank 0 made."""
    key = given_key()
    if key is not None and not door.launch:
        return key
    if not world.one_machine:
        raise key_missing(world.rank)
    return fetched_key(door.launch, world.rank)


def come_in(world: RankEnvironment, door: DriverAddress, hear: Hear | None) -> BackgroundWorker:
    """Become the worker of a launch."""
    key = key_for(world, door)
    try:
        channel = connect((door.host, door.port), key, world.rank, PATIENCE, CODEC)
    except ClosedError as error:
        raise LaunchError(
            "this rank and rank 0 do not know the same key",
            by=f"rank {world.rank}",
            facts={"at": f"{door.host}:{door.port}", "why": str(error)},
            hint=HOW,
        ) from error
    descriptor = nameless_file(ProgressMarks.size(1, door.width))
    cells = ProgressMarks(descriptor, [world.rank], door.width).of(world.rank)
    channel.send(
        RankInfo(
            process=os.getpid(),
            address=own_address(world),
            local=world.local,
            marks=SharedFile.of(descriptor),
            listens=hear is not None,
        )
    )
    welcome = cast(RankAssignment, channel.recv())
    os.close(descriptor)  # rank 0 has opened it by now, if it can
    initial = values_of(welcome)
    return BackgroundWorker(
        channel,
        welcome.order.device,
        lambda: WorkerServer(welcome.order, initial, cells),
        hear or (lambda told: None),
    )


def values_of(welcome: RankAssignment) -> Initial:
    """The first values that a rank was given."""
    if welcome.memory is not None:
        return HeldValues(welcome.memory.numpy(), welcome.values)
    assert welcome.shared is not None
    descriptor = welcome.shared.open()
    assert descriptor is not None, "rank 0 found us on its machine"
    try:
        return SharedValues(descriptor, welcome.values)
    finally:
        os.close(descriptor)


def attend(world: RankEnvironment) -> None:
    """Be a worker of everything that rank 0 launches, until it is done."""
    check_key(world)
    posts: list[BackgroundWorker] = []
    for door in doors(world):
        with suppress(OSError):  # rank 0 has closed it again
            posts.append(come_in(world, door, None))
    for post in posts:
        post.wait()


class TorchrunWorkerRun(Trains):
    """A run as the other ranks see it: rank 0 cuts the batch, and all get the same results."""

    def __init__(self, program: ProgramLike, told: SimpleQueue[RankZeroResult | None]) -> None:
        self.program, self.told = program, told
        self.over = False

    def _next(self, method: str) -> object:
        """What the method gave on rank 0, which may have asked for more in between."""
        while not self.over:
            told = self.told.get()
            if told is None:
                break
            if told.error is not None:
                raise again(told)
            if told.method == method:
                return told.value
            if told.method in CHANGES:
                raise LaunchError(
                    "the ranks do not do the same",
                    by="run",
                    facts={"rank 0": told.method, "here": method},
                    hint="call step, load, save and the like on every rank, in one order",
                )
        self.over = True
        raise WorkerError(
            "the run has ended on rank 0", by="run", hint="look at what rank 0 says; it may have failed"
        )

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on one global batch: the one that rank 0 gives."""
        return cast(StepResult, self._next("step"))

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, by fully qualified name."""
        return cast("dict[str, Tensor]", self._next("state_dict"))

    def gradients(self) -> dict[str, Tensor]:
        """The last step's gradients in full, before clipping."""
        return cast("dict[str, Tensor]", self._next("gradients"))

    def trails(self) -> dict[int, dict[Mark, Tensor]]:
        """What every chunk returned in the last step, by device."""
        return cast("dict[int, dict[Mark, Tensor]]", self._next("trails"))

    def recordings(self) -> dict[int, tuple[Recording, Clock]]:
        """When the instructions of the recorded steps ran, by device, on rank 0's clock."""
        return cast("dict[int, tuple[Recording, Clock]]", self._next("recordings"))

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Write a checkpoint: where rank 0 says."""
        self._next("save")

    def load(self, path: Path | str) -> Resumed:
        """Go on from the checkpoint that rank 0 names."""
        return cast(Resumed, self._next("load"))

    def settle(self) -> None:
        """Wait until what is being saved is complete."""
        self._next("settle")

    def close(self) -> None:
        """Ask for nothing any more; the worker serves on until rank 0 ends the run."""
        self.over = True


def again(told: RankZeroResult) -> PiperError:
    """The error that rank 0 has raised."""
    kind = cast("type[PiperError]", getattr(errors, told.error or ""))
    error = kind.__new__(kind)
    error.args = (told.text,)
    for note in told.notes:
        error.add_note(note)
    return error


@contextmanager
def launch_torchrun_worker(program: ProgramLike, world: RankEnvironment) -> Iterator[TorchrunWorkerRun]:
    """Take part in what rank 0 launches. The block's end waits for the end of the run there."""
    check_size(world, len(devices_of(program.plans)))
    check_key(world)
    threads = torch.get_num_threads()
    told: SimpleQueue[RankZeroResult | None] = SimpleQueue()
    post = come_in(world, find_door(world, next_launch(world)), told.put)
    try:
        yield TorchrunWorkerRun(program, told)
        post.wait()
    finally:
        post.leave()
        torch.set_num_threads(threads)
