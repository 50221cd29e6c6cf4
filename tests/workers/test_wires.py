"""Waits on sockets that libraries open end when the other machine is lost."""

import socket

from piper.workers.transport.channel import kept_alive


def watched(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_sockets_that_are_opened_inside_the_block_are_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = socket.create_connection(listening.getsockname(), 5)
        with kept_alive():
            inside = socket.create_connection(listening.getsockname(), 5)
            pair = socket.socketpair()
        assert (watched(before), watched(inside)) == (False, True)
        for end in (before, inside, *pair):
            end.close()
