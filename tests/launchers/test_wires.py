"""Ending waits by ending the sockets they go over."""

import os
import socket

import pytest

from piper.launchers.transport import open_sockets
from piper.launchers.transport.open_sockets import OpenSockets


def test_only_what_was_opened_meanwhile_is_cut() -> None:
    before = socket.socketpair()
    cutter = OpenSockets()
    with cutter.recording():
        pair = socket.socketpair()
        listening = socket.create_server(("127.0.0.1", 0))
    cutter.shut()
    pair[0].settimeout(5)
    assert pair[0].recv(1) == b""
    before[0].sendall(b"x")
    assert before[1].recv(1) == b"x"
    with socket.create_connection(listening.getsockname(), 5):
        pass
    for end in (*before, *pair, listening):
        end.close()


def test_a_socket_that_its_owner_closes_first_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    cutter = OpenSockets()
    with cutter.recording():
        first, second = socket.socketpair(), socket.socketpair()
    seen = open_sockets.sockets()
    monkeypatch.setattr(open_sockets, "sockets", lambda: seen)
    os.close(first[0].detach())  # between looking and cutting
    cutter.shut()
    second[1].settimeout(5)
    assert second[1].recv(1) == b""
    for end in (first[1], *second):
        end.close()
