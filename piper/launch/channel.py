"""Messages between two processes of one machine: a length, then the bytes. No side waits for ever."""

import socket
import struct

from piper.launch.freight import pack, unpack

LENGTH = struct.Struct("!Q")


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
            self.end.sendall(LENGTH.pack(len(data)))
            self.end.sendall(data)
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
