"""Which connections a driver accepts, and what travels over them."""

import asyncio
import errno
import hmac
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from piper.workers.processes import ClosedError
from piper.workers.transport.channel import (
    ANSWER,
    GREETING,
    NONCE,
    PENDING,
    Channel,
    Listener,
    connect,
)
from tests.workers.bounds import set_timeouts

KEY = b"k" * 32
OTHER = b"x" * 32


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener("127.0.0.1", KEY, 5.0)) as made:
        yield made


def test_a_worker_that_knows_the_key_is_accepted(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect, listener.address, KEY, 3, 5.0)
        arrived = listener.accept(5.0)
        worker = coming.result(5)
    assert arrived is not None
    name, driver = arrived
    assert name == 3
    for number in range(3):
        driver.send(["step", number])
        assert worker.recv() == ["step", number]
        worker.send({"loss": number / 3})
        assert driver.recv() == {"loss": number / 3}
    driver.close()
    with pytest.raises(ClosedError):
        worker.recv()
    worker.close()


def test_a_worker_that_came_while_nobody_waited_is_accepted(listener: Listener) -> None:
    connect(listener.address, KEY, 3, 5.0).close()
    until, arrived = time.monotonic() + 5, None
    while arrived is None and time.monotonic() < until:
        arrived = listener.accept(0.0)
    assert arrived is not None and arrived[0] == 3
    arrived[1].close()


def test_a_worker_with_another_key_is_not(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect, listener.address, OTHER, 3, 5.0)
        assert listener.accept(2.0) is None
        with pytest.raises(ClosedError):
            coming.result(10)


def test_a_driver_with_another_key_is_not_believed() -> None:
    """Whoever points a worker at a listener of their own cannot make it read a message."""
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect, door.getsockname(), KEY, 3, 5.0)
        for _ in range(5):  # it tries several times
            end, _ = door.accept()
            with end:
                end.sendall(GREETING + b"n" * NONCE)
                assert len(end.recv(ANSWER, socket.MSG_WAITALL)) == 68
                end.sendall(hmac.digest(OTHER, b"anything", "sha256"))
        with pytest.raises(ClosedError, match="what listens there does not know the key"):
            coming.result(10)


def test_an_answer_cannot_be_used_twice(listener: Listener) -> None:
    """The proof belongs to the random number that the listener has chosen for one connection."""
    with socket.create_connection(listener.address, 5.0) as first, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(listener.accept, 1.0)
        relayed = first.recv(len(GREETING) + NONCE, socket.MSG_WAITALL)
        with socket.create_server(("127.0.0.1", 0)) as door:
            coming = threads.submit(connect, door.getsockname(), KEY, 3, 5.0)
            assert accepting.result(5) is None
            end, _ = door.accept()
            end.sendall(relayed)
            answer = end.recv(ANSWER, socket.MSG_WAITALL)
            with socket.create_connection(listener.address, 5.0) as second:
                second.sendall(answer)
                assert listener.accept(0.5) is None
            end.close()
            door.close()
        with pytest.raises(OSError):
            coming.result(10)


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_a_thousand_strangers_do_not_delay_a_worker(listener: Listener) -> None:
    """A third of them reset, a third send nothing, a third send garbage; some even send a pickle."""
    idle: list[socket.socket] = []
    done = threading.Event()

    def visit() -> None:
        for number in range(1000):
            end = socket.create_connection(listener.address, 10.0)
            if number % 3 == 0:
                reset(end)
            elif number % 3 == 1:
                idle.append(end)
            else:
                end.sendall(b"\x80\x04\x95" + b"\xff" * 200)
                end.close()
        done.set()

    with ThreadPoolExecutor(2) as threads:
        visiting = threads.submit(visit)
        while not done.is_set():
            assert listener.accept(0.05) is None
            assert len(listener.visitors) <= PENDING
        visiting.result(30)
        coming = threads.submit(connect, listener.address, KEY, 1, 5.0)
        arrived = listener.accept(5.0)
        coming.result(5).close()
    assert arrived is not None and arrived[0] == 1
    arrived[1].close()
    for end in idle:
        end.close()


def test_a_connection_that_stays_idle_is_dropped(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, "transport.channel", handshake=0.1)
    with socket.create_connection(listener.address, 5.0) as idle:
        assert listener.accept(0.5) is None
        assert idle.recv(1000).startswith(GREETING)
        assert idle.recv(1) == b""
    assert not listener.visitors


def test_without_free_descriptors_a_worker_waits_and_the_driver_is_not_kept_busy(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def full(own: socket.socket) -> tuple[socket.socket, object]:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", full)
            coming = threads.submit(connect, listener.address, KEY, 3, 5.0)
            assert listener.accept(0.5) is None
        assert len(tried) == 1, "it looks again after a second"
        arrived = listener.accept(5.0)
        coming.result(5).close()
    assert arrived is not None
    arrived[1].close()


def test_a_connection_that_arrives_while_the_listener_closes_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Listener("127.0.0.1", KEY, 5.0)
    admitted: list[int] = []
    late: list[socket.socket] = []
    admit, greet = made._admit, made._greet

    async def visited(end: socket.socket) -> None:
        try:
            await greet(end)
        finally:
            if not late:
                late.append(socket.create_connection(made.address, 5.0))
                await asyncio.sleep(0.05)

    def counted() -> None:
        admitted.append(len(late))
        admit()

    monkeypatch.setattr(made, "_greet", visited)
    made.loop.call_soon_threadsafe(made.loop.add_reader, made.socket, counted)
    with socket.create_connection(made.address, 5.0) as first:
        assert first.recv(1000).startswith(GREETING)
        made.close()
    late[0].close()
    assert admitted == [0]


@pytest.mark.parametrize("edit", ["none", "flip", "repeat", "forge"])
def test_a_frame_cannot_be_changed_repeated_or_made_by_others(edit: str) -> None:
    sender, wire = socket.socketpair()
    relay, receiver = socket.socketpair()
    with sender, wire, relay, receiver:
        wire.settimeout(5.0)
        Channel(sender, 5.0, keys=(b"a" * 32, b"b" * 32)).send("step")
        frame = wire.recv(1000)
        assert len(frame) == 54  # a length of 8, a header of 8, the text of 6 and a digest of 32
        if edit == "flip":
            frame = frame[:20] + bytes([frame[20] ^ 1]) + frame[21:]
        if edit == "forge":
            frame = frame[:-32] + hmac.digest(OTHER, frame[:-32], "sha256")
        channel = Channel(receiver, 5.0, keys=(b"b" * 32, b"a" * 32))
        relay.sendall(frame)
        if edit in ("none", "repeat"):
            assert channel.recv() == "step"
        if edit == "repeat":
            relay.sendall(frame)
        if edit != "none":
            with pytest.raises(ClosedError, match="a frame does not carry the digest of this channel's key"):
                channel.recv()


def test_a_driver_does_not_wait_for_ever() -> None:
    here, there = socket.socketpair()
    with here, there:
        channel = Channel(here, 0.05)
        with pytest.raises(TimeoutError):
            channel.recv()
        with pytest.raises(TimeoutError):
            channel.send(b"x" * 10_000_000)


def test_a_frame_that_claims_too_much_ends_the_channel() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"\xff" * 8)
        with pytest.raises(ClosedError, match="a frame claims to hold 18446744073709551615 bytes"):
            Channel(here, 1.0).recv()
