"""Messages between two processes: a length, then the bytes. The driver's side never waits for ever."""

import hashlib
import hmac
import secrets
import socket
import struct

from piper.launchers.freight import pack, unpack

LENGTH = struct.Struct("!Q")
NAME = struct.Struct("!I")
QUESTION = 32  # bytes that a newcomer has to sign


class ClosedError(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a socket."""

    def __init__(self, end: socket.socket, timeout: float | None = None) -> None:
        self.end = end
        end.settimeout(timeout)  # None: for the side whose only business it is to wait

    def fileno(self) -> int:
        """What to select on."""
        return self.end.fileno()

    def send(self, value: object) -> None:
        """Send a value."""
        self.send_bytes(pack(value))

    def send_bytes(self, data: bytes) -> None:
        """Send a value that is packed already."""
        try:
            self.end.sendall(LENGTH.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ClosedError("the other process is gone") from error

    def recv(self) -> object:
        """The next value."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return unpack(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            try:
                count = self.end.recv_into(view[got:])
            except ConnectionResetError as error:
                raise ClosedError("the other process is gone") from error
            if not count:
                raise ClosedError("the other process is gone")
            got += count
        return data

    def close(self) -> None:
        """Close this end."""
        self.end.close()


def join(address: tuple[str, int], key: bytes, name: int, timeout: float) -> Channel:
    """Connect to a driver under a name, and prove to it that we know the key."""
    end = socket.create_connection(address, timeout)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = NAME.pack(name)
    question = end.recv(QUESTION, socket.MSG_WAITALL)
    end.sendall(number + hmac.digest(key, question + number, "sha256"))
    return Channel(end)


def admit(door: socket.socket, key: bytes, timeout: float) -> tuple[int, Channel] | None:
    """Let somebody in who knows the key, and their name; None for anybody else."""
    end, _ = door.accept()
    end.settimeout(timeout)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    question = secrets.token_bytes(QUESTION)
    end.sendall(question)
    answer = end.recv(NAME.size + hashlib.sha256().digest_size, socket.MSG_WAITALL)
    number, proof = answer[: NAME.size], answer[NAME.size :]
    if not hmac.compare_digest(proof, hmac.digest(key, question + number, "sha256")):
        end.close()
        return None
    return NAME.unpack(number)[0], Channel(end, timeout)
