"""Who may speak to a driver."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from piper.launchers.channel import Channel, ClosedError, admit, join

KEY = b"k" * 32


@pytest.mark.parametrize("key", [KEY, b"x" * 32], ids=["the key", "another key"])
def test_only_who_knows_the_key_is_let_in(key: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(join, door.getsockname(), key, 3, 5.0)
        newcomer = admit(door, KEY, 5.0)
        worker = coming.result(5)
        if key != KEY:
            assert newcomer is None
            with pytest.raises(ClosedError):
                worker.recv()
            return
        assert newcomer is not None
        name, driver = newcomer
        assert name == 3
        driver.send(["step", 1])
        assert worker.recv() == ["step", 1]
        driver.close()
        worker.close()


def test_a_driver_does_not_wait_for_ever() -> None:
    here, there = socket.socketpair()
    with here, there:
        channel = Channel(here, 0.05)
        with pytest.raises(TimeoutError):
            channel.recv()
        with pytest.raises(TimeoutError):
            channel.send_bytes(b"x" * 10_000_000)
