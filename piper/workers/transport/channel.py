"""Messages between two processes over a socket, after both have proved that they know one key.

[Note: handshake] The listener sends a random number. The worker answers with its name, a random number of
its own and an HMAC over all three under the key. The listener proves the same, under another label, and only
then does either side read a message. Both derive a key for each direction from the exchange. Every frame ends
with an HMAC over its number, its length and its content under that key, so frames cannot be added, changed,
repeated or left out.
"""

import asyncio
import errno
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, sleep

from piper.workers.processes import ClosedError, read_exactly
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.serialize import Codec, MessageError

LENGTH = struct.Struct("!Q")
NAME = struct.Struct("!I")
NONCE = 32  # bytes
PROOF = hashlib.sha256().digest_size
ANSWER = NAME.size + NONCE + PROOF  # what a worker sends during the handshake
GREETING = b"piper/1\n"
PENDING = 256  # connections that may be in their handshake at a time; the oldest gives way to a new one
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # nothing can be accepted for the moment
TRIES = 5  # times that a worker connects: a crowded listener may drop one connection, but not all of them
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
PLAIN = Codec()
WORKER_KNOWS, LISTENER_KNOWS = "worker knows the key", "listener knows the key"  # what is proven


class Channel:
    """One end of a socket that carries typed messages."""

    def __init__(
        self,
        end: socket.socket,
        timeout: float | None = None,
        *,
        codec: Codec = PLAIN,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Wrap one end of a connection.

        timeout: seconds that one call may wait. None: without limit, for a process that only waits for calls.
        keys: of the frames that this end sends and receives, over a network. None: it is a pair of sockets.
        """
        self.end, self.codec, self.keys = end, codec, keys
        self.sent = self.received = 0  # frames
        self.sending = threading.Lock()
        self.lost: Callable[[], bool] = lambda: False  # whether to give up before the timeout
        self.limit(timeout)

    def limit(self, timeout: float | None) -> None:
        """Let one call wait for so many seconds from now on. None: without limit."""
        self.timeout = timeout
        self.end.settimeout(None if timeout is None else min(timeout, TIMEOUTS.channel_poll))

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self.end.fileno()

    def send(self, value: object) -> None:
        """Send one message. Several threads may send."""
        message = self.codec.encode(value)
        length = LENGTH.pack(len(message))
        with self.sending:
            tag = b"" if self.keys is None else frame_tag(self.keys[0], self.sent, length, message)
            left = memoryview(b"".join((length, message, tag)))
            while left:
                left = left[self._patiently(self.end.send, left) :]
            self.sent += 1

    def recv(self) -> object:
        """Return the next message."""
        head = self._read(LENGTH.size)
        (length,) = LENGTH.unpack(head)
        try:
            message = self._read(length)
        except (MemoryError, OverflowError) as error:
            raise ClosedError(f"a frame claims to hold {length} bytes") from error
        if self.keys is not None:
            wanted = frame_tag(self.keys[1], self.received, bytes(head), message)
            if not hmac.compare_digest(wanted, self._read(PROOF)):
                raise ClosedError("a frame does not carry the digest of this channel's key")
        self.received += 1
        try:
            return self.codec.decode(message)
        except MessageError as error:
            raise ClosedError(str(error)) from error

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view, got = memoryview(data), 0
        while got < length:
            count = self._patiently(self.end.recv_into, view[got:])
            if not count:
                raise ClosedError("the other process is gone")
            got += count
        return data

    def _patiently(self, move: Callable[[memoryview], int], data: memoryview) -> int:
        """Send or receive some bytes. Give up after the timeout, or when the other process is lost."""
        began = monotonic()
        while True:
            try:
                return move(data)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ClosedError("the other process is gone") from error
            except OSError as error:
                if error.errno in UNREACHABLE:
                    raise ClosedError("the other machine cannot be reached") from error
                if not isinstance(error, TimeoutError):
                    raise
                if self.lost() or monotonic() - began >= (self.timeout or 0.0):
                    raise

    def close(self) -> None:
        """Close this end."""
        self.end.close()


def frame_tag(key: bytes, number: int, length: bytes, message: bytes | bytearray) -> bytes:
    """Return the digest that ends a frame."""
    tag = hmac.new(key, LENGTH.pack(number), "sha256")
    tag.update(length)
    tag.update(message)
    return tag.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """What both sides of a new connection know once it is made; see [Note: handshake]."""

    key: bytes
    listener: bytes  # the random number of the side that listens
    worker: bytes  # and of the side that connects
    name: int  # of the worker

    def digest(self, label: str) -> bytes:
        """Return the digest that only a process that knows the key can make, for one purpose."""
        said = GREETING + label.encode() + b"\0" + self.listener + self.worker + NAME.pack(self.name)
        return hmac.digest(self.key, said, "sha256")

    def frame_keys(self, *, listens: bool) -> tuple[bytes, bytes]:
        """Return the keys for the frames that one side sends and receives."""
        keys = self.digest("frames to worker"), self.digest("frames to listener")
        return keys if listens else (keys[1], keys[0])


def connect(address: tuple[str, int], key: bytes, name: int, timeout: float, codec: Codec = PLAIN) -> Channel:
    """Connect to a listener under a name. Raise ClosedError if the listener does not prove its key."""
    for _ in range(TRIES - 1):
        try:
            return _connect(address, key, name, timeout, codec)
        except (ClosedError, ConnectionResetError):
            sleep(TIMEOUTS.connect_pause)
    return _connect(address, key, name, timeout, codec)


def _connect(address: tuple[str, int], key: bytes, name: int, timeout: float, codec: Codec) -> Channel:
    end = socket.create_connection(address, timeout)
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(end)
        greeting = read_exactly(end, len(GREETING) + NONCE)
        if not greeting.startswith(GREETING):
            raise ClosedError("what listens there is not a driver of this version")
        shake = Handshake(
            key=key, listener=greeting[len(GREETING) :], worker=secrets.token_bytes(NONCE), name=name
        )
        end.sendall(NAME.pack(name) + shake.worker + shake.digest(WORKER_KNOWS))
        if not hmac.compare_digest(read_exactly(end, PROOF), shake.digest(LISTENER_KNOWS)):
            raise ClosedError("what listens there does not know the key")
    except BaseException:
        end.close()
        raise
    return Channel(end, codec=codec, keys=shake.frame_keys(listens=False))


class Listener:
    """A socket at which workers arrive. Connections that reset, stay idle or send garbage delay no other."""

    def __init__(self, address: str, key: bytes, timeout: float | None, codec: Codec = PLAIN) -> None:
        """Listen on a free port of an address, in a thread; `timeout`: of the channels to the workers."""
        self.key, self.timeout, self.codec = key, timeout, codec
        self.socket = socket.create_server((address, 0), backlog=1024)
        self.socket.setblocking(False)
        self.visitors: dict[socket.socket, asyncio.Task[None]] = {}  # in their handshake, the oldest first
        self.arrived: SimpleQueue[tuple[int, Channel]] = SimpleQueue()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self.thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port to connect to."""
        host, port = self.socket.getsockname()[:2]
        return host, port

    def accept(self, timeout: float) -> tuple[int, Channel] | None:
        """Return the name and channel of the next worker, or None if none arrives in time."""
        try:
            return self.arrived.get(timeout=timeout)
        except Empty:
            return None

    def _run(self) -> None:
        self.loop.add_reader(self.socket, self._admit)
        self.loop.run_forever()
        self.loop.remove_reader(self.socket)
        for visit in [*self.visitors.values()]:
            visit.cancel()
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(visit)
        self.loop.close()

    def _admit(self) -> None:
        try:
            end, _ = self.socket.accept()
        except OSError as error:
            if error.errno in FULL:  # until some are closed, the socket stays ready: look again later
                self.loop.remove_reader(self.socket)
                self.loop.call_later(1.0, self.loop.add_reader, self.socket, self._admit)
            return  # else it was reset before it was accepted
        end.setblocking(False)
        if len(self.visitors) >= PENDING:
            self.visitors.pop(next(iter(self.visitors))).cancel()
        self.visitors[end] = self.loop.create_task(self._greet(end))

    async def _greet(self, end: socket.socket) -> None:
        """Take in a worker that proves in time that it knows the key. Drop any other connection."""
        shake = None
        with suppress(OSError, asyncio.CancelledError):
            async with asyncio.timeout(TIMEOUTS.handshake):
                shake = await self._shake(end)
        self.visitors.pop(end, None)
        if shake is None:
            end.close()
            return
        channel = Channel(end, self.timeout, codec=self.codec, keys=shake.frame_keys(listens=True))
        self.arrived.put((shake.name, channel))

    async def _shake(self, end: socket.socket) -> Handshake | None:
        """Return the handshake with a worker, if it proves that it knows the key."""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(end)
        nonce, answer = secrets.token_bytes(NONCE), b""
        await self.loop.sock_sendall(end, GREETING + nonce)
        while len(answer) < ANSWER:
            got = await self.loop.sock_recv(end, ANSWER - len(answer))
            if not got:
                return None  # it has left
            answer += got
        name, worker, proof = answer[: NAME.size], answer[NAME.size : -PROOF], answer[-PROOF:]
        shake = Handshake(key=self.key, listener=nonce, worker=worker, name=NAME.unpack(name)[0])
        if not hmac.compare_digest(proof, shake.digest(WORKER_KNOWS)):
            return None
        await self.loop.sock_sendall(end, shake.digest(LISTENER_KNOWS))
        return shake

    def close(self) -> None:
        """Stop listening, and close what has not become a channel of the caller's."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        for end in self.visitors:
            end.close()
        while (arrived := self.accept(0.0)) is not None:
            arrived[1].close()
        self.socket.close()


PROBES = 3  # times that a silent machine is asked before its connections end


def keep_alive(end: socket.socket) -> None:
    """Let waits on a connection end when the other machine is lost: it cannot close the connection."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TIMEOUTS.link_idle)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TIMEOUTS.link_probe)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TIMEOUTS.unread * 1000)


@contextmanager
def kept_alive() -> Iterator[None]:
    """Let waits on the sockets that are opened inside the block end when the other machine is lost."""
    before = sockets()
    yield
    for fd, inode in sockets().items():
        if before.get(fd) != inode:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:  # another thread may close one
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    keep_alive(end)


def sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets, by descriptor."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.fstat(int(name))
        except OSError:
            continue  # the one that listed them
        if stat.S_ISSOCK(about.st_mode):
            inodes[int(name)] = about.st_ino
    return inodes
