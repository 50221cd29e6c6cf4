"""A worker in a process that has more to do: one thread hears what the driver asks, another answers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import cast

from piper.launchers.messages import Call, Heartbeat, RankZeroResult
from piper.launchers.transport.channel import Channel, ClosedError
from piper.launchers.watch import failure_of
from piper.launchers.wires import OpenSockets
from piper.launchers.worker_server import WorkerServer

LEAVE = 5.0  # seconds that a worker may take to end when its wires are cut


BEAT = 2.0  # seconds between two signs that a worker is still at work
Message = RankZeroResult | tuple[Call, object]
Hear = Callable[[RankZeroResult | None], None]  # None: the run has ended


@contextmanager
def beating(channel: Channel) -> Iterator[None]:
    """Send a beat every few seconds inside the block, so that the driver knows that this process runs."""
    done = threading.Event()

    def beat() -> None:
        with suppress(ClosedError, OSError):  # the driver is gone, which the worker is about to see
            while not done.wait(BEAT):
                channel.send(Heartbeat())

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class BackgroundWorker:
    """A worker at the end of a channel."""

    def __init__(
        self, channel: Channel, device: int, build: Callable[[], WorkerServer], hear: Hear = lambda told: None
    ) -> None:
        self.channel, self.device, self.build, self.hear = channel, device, build, hear
        self.calls: SimpleQueue[tuple[Call, object] | None] = SimpleQueue()
        self.wires = OpenSockets()
        self.threads = [
            threading.Thread(target=act, name=f"device {device}", daemon=True)
            for act in (self._read, self._work)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        """Hear the driver until it is gone; then nobody waits for anybody any more."""
        with suppress(ClosedError, OSError):
            while True:
                message = cast(Message, self.channel.recv())
                if isinstance(message, RankZeroResult):
                    self.hear(message)
                else:
                    self.calls.put(message)
        try:
            self.wires.cut()
        finally:  # whatever becomes of the wires: those who wait here are told
            self.calls.put(None)
            self.hear(None)

    def _work(self) -> None:
        with suppress(ClosedError, OSError):
            try:
                with self.wires.recording():
                    member = self.build()
            except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
                self.channel.send(failure_of(self.device, error))
                return
            try:
                self.channel.send(None)
                while (asked := self.calls.get()) is not None:
                    with beating(self.channel):
                        answer = member.answer(*asked)
                    self.channel.send(answer)
            finally:
                member.close()

    def wait(self) -> None:
        """Be at the driver's disposal until it is gone."""
        for thread in self.threads:
            thread.join()

    def leave(self) -> None:
        """End, whatever the driver does."""
        with suppress(OSError):
            self.channel.end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(LEAVE)
        self.channel.close()
