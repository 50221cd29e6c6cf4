"""A process that has imported torch and does nothing but fork workers.

Workers start in milliseconds instead of seconds each. The nursery is their parent: it tells how they end, and
when the process that started it is gone, however it went, the nursery kills its workers and ends too.
"""

import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from piper.errors import LaunchError
from piper.launchers.polling import readable

PRELOAD = "torch._dynamo"  # torch imports it when an optimizer is made, and it takes as long as torch itself
PROGRAM = "import sys; from piper.launchers.nursery import serve; serve(int(sys.argv[1]), *sys.argv[2:])"
WORKER = "piper.launchers.member"  # the module whose `main` a worker runs
NOTICE = struct.Struct("!Bii")  # what happened, to which process, and how it ended
READY, FORKED, ENDED = range(3)
Main = Callable[[Sequence[int]], int]  # takes its descriptors; gives its exit code
MOST = 8  # descriptors that a worker may be given
START = 120.0  # seconds that importing torch may take


class Nursery:
    """The driver's end: asks for workers and hears of their ends."""

    def __init__(self, module: str = WORKER, preload: str = PRELOAD) -> None:
        """`module`: its `main` is what a worker runs. `preload`: another that workers need, imported once."""
        here, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(there.fileno()), module, preload],
                pass_fds=[there.fileno()],
                env={**os.environ, **import_path(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the driver, which then ends its workers
            )
        self.end = here
        self.ready = False
        self.exits: dict[int, int] = {}

    def fork(self, descriptors: Sequence[int]) -> int:
        """Start a worker that owns these descriptors; its process id."""
        if not self.ready:
            self._notice(READY)
        socket.send_fds(self.end, [b"f"], descriptors)
        return self._notice(FORKED)[0]

    def _notice(self, wanted: int) -> tuple[int, int]:
        """The next notice of this kind; the others are remembered."""
        self.end.settimeout(START)
        try:
            while True:
                kind, pid, status = NOTICE.unpack(read_exactly(self.end, NOTICE.size))
                if kind == ENDED:
                    self.exits[pid] = status
                if kind == READY:
                    self.ready = True
                if kind == wanted:
                    return pid, status
        except (EOFError, TimeoutError) as error:
            raise LaunchError(
                "no process can be started",
                by="launch",
                facts={"why": f"{type(error).__name__}: {error}"},
                hint="look at what the process printed; is the machine out of memory or processes?",
            ) from error

    def fileno(self) -> int:
        """What to select on, to hear of ends as they come."""
        return self.end.fileno()

    def ended(self) -> Mapping[int, int]:
        """How the processes that have ended did so, by process id: an exit code, or a signal below zero."""
        while readable([self.end.fileno()], 0.0):
            try:
                kind, pid, status = NOTICE.unpack(read_exactly(self.end, NOTICE.size))
            except EOFError:
                break
            if kind == ENDED:
                self.exits[pid] = status
        return self.exits

    def wait(self, pids: Sequence[int], timeout: float) -> None:
        """Wait until these processes have ended, but not for longer."""
        while not all(pid in self.ended() for pid in pids):
            if not readable([self.end.fileno()], timeout) or self.process.poll() is not None:
                return

    def close(self) -> None:
        """End the nursery and every process it started."""
        self.end.close()
        self.process.wait(START)


def import_path() -> dict[str, str]:
    """Where this package and the driver's modules are found."""
    package = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*filter(None, sys.path), package]))}


@contextmanager
def nursery(module: str = WORKER) -> Iterator[Nursery]:
    """A nursery that ends with the block."""
    made = Nursery(module)
    try:
        yield made
    finally:
        made.close()


def read_exactly(end: socket.socket, size: int) -> bytes:
    """This many bytes, or EOFError."""
    data = b""
    while len(data) < size:
        got = end.recv(size - len(data))
        if not got:
            raise EOFError("the nursery is gone")
        data += got
    return data


def serve(descriptor: int, module: str, preload: str) -> None:
    """Fork workers as asked; runs in the nursery's own process until the driver is gone."""
    end = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    importlib.import_module(preload)
    main: Main = importlib.import_module(module).main
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    tell(end, READY, os.getpid(), 0)
    try:
        while True:
            ready = readable([end.fileno(), awake])
            if awake in ready:
                os.read(awake, 4096)
                for pid, status in reap():
                    children.discard(pid)
                    tell(end, ENDED, pid, status)
            if end.fileno() in ready:
                descriptors = asked(end)
                if descriptors is None:
                    return
                pid = fork(main, [end.fileno(), awake, waker], descriptors)
                children.add(pid)
                tell(end, FORKED, pid, 0)
    finally:  # whatever happens, no worker outlives the nursery
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        end_all(children)


def asked(end: socket.socket) -> list[int] | None:
    """The descriptors of a worker that is asked for; None when there is nobody left to ask."""
    try:
        request, descriptors, _, _ = socket.recv_fds(end, 1, MOST)
    except ConnectionResetError:  # the driver went without reading all that it was told
        return None
    return descriptors if request else None


def tell(end: socket.socket, what: int, pid: int, status: int) -> None:
    """Say what happened to a process, if there is anybody to hear it."""
    try:
        end.sendall(NOTICE.pack(what, pid, status))
    except OSError:
        return  # the driver is gone, which the loop is about to see


def reap() -> Iterator[tuple[int, int]]:
    """The children that have ended, and how."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_all(children: set[int]) -> NoReturn:
    """Kill what still runs, stopped or not, and end."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)


def fork(main: Main, ours: Sequence[int], descriptors: Sequence[int]) -> int:
    """Start a worker on its descriptors."""
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in ours:
        os.close(descriptor)
    code = 1
    try:
        code = main(descriptors)
    finally:  # whatever happens, a worker never returns into the nursery's loop
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
