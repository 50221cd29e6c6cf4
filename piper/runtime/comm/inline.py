"""Devices as threads of one process: a mailbox for every pair that communicates, made before the run."""

import queue
import threading
from collections.abc import Sequence
from itertools import permutations

from torch import Tensor

from piper.ir.devices import Devices
from piper.plan.plan import Plans
from piper.runtime.comm.base import CommError, Comms, Form, Group, StoppedError

Box = queue.SimpleQueue[Tensor | None]  # None: the world has stopped


class World:
    """All mailboxes of a job whose devices are threads of this process."""

    def __init__(self, plans: Plans, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.stopped = threading.Event()
        self.boxes: dict[tuple[str, int, int], Box] = {}
        self.comms = plans.comms
        for comm in plans.comms.values():
            for group in comm.groups:
                for sender, receiver in [group] if comm.kind == "pairs" else permutations(group, 2):
                    self.boxes[comm.name, sender, receiver] = queue.SimpleQueue()

    def member(self, device: int) -> "InlineComms":
        """Return the communicators as one device sees them."""
        return InlineComms(self, device)

    def stop(self) -> None:
        """End every wait, now and later: a worker has failed and will not answer."""
        self.stopped.set()
        for box in self.boxes.values():
            box.put(None)

    def take(self, name: str, sender: int, receiver: int) -> Tensor:
        """Return the next value that one device sent another; wait for it until the timeout."""
        try:
            value = self.boxes[name, sender, receiver].get(timeout=self.timeout)
        except queue.Empty:
            raise CommError(
                f"device {receiver} waited {self.timeout:g} s on {name} for device {sender}"
            ) from None
        if value is None:
            self.boxes[name, sender, receiver].put(None)
            raise StoppedError(
                f"device {receiver} stops waiting on {name} for device {sender}: a worker has failed"
            )
        return value


class InlineComms(Comms):
    """The communicators of one device among threads."""

    def __init__(self, world: World, device: int) -> None:
        super().__init__(world.comms, device)
        self.world = world

    def group_of(self, name: str, members: Devices) -> "InlineGroup":
        return InlineGroup(self.world, name, members, self.device)

    def pipe(self, name: str, ends: Devices) -> "InlinePipe":
        return InlinePipe(self.world, name, *ends)

    def abort(self) -> None:
        self.world.stop()


class InlineGroup(Group):
    """A group among threads: values are handed over, not copied."""

    def __init__(self, world: World, name: str, members: Devices, device: int) -> None:
        super().__init__(name, members.index(device), len(members))
        self.world, self.members, self.device = world, members, device
        self.out = [world.boxes[name, device, other].put if other != device else None for other in members]

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        for put, part in zip(self.out, parts, strict=True):
            if put is not None:
                put(part)
        world, name, me = self.world, self.name, self.device
        return [parts[self.rank] if other == me else world.take(name, other, me) for other in self.members]

    def all_gather_uneven(self, shard: Tensor, out: Tensor, lengths: Sequence[int]) -> None:
        super().all_gather_uneven(shard, out, lengths)
        self.swap([shard[:0]] * self.size, [0] * self.size)  # all have read it: now an update may write to it

    def shift(self, flat: Tensor, by: int) -> Tensor:
        return super().shift(flat, by).clone()  # a gradient may be added to where it arrives


class InlinePipe:
    """A mailbox between two threads."""

    def __init__(self, world: World, name: str, sender: int, receiver: int) -> None:
        self.world, self.key = world, (name, sender, receiver)
        self.put = world.boxes[self.key].put

    def send(self, value: Tensor) -> None:
        self.put(value)

    def recv(self, form: Form) -> Tensor:
        return self.world.take(*self.key)
