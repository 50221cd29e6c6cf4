"""A process that has imported torch and does nothing but fork workers.

Workers start in milliseconds instead of seconds each. The fork server is their parent: it reports how they
end, and when the driver is gone it kills its workers and ends. On Linux the system itself kills it with the
driver, and workers with it, so that a stopped one cannot stay behind.

The standard library's fork server is not used: it imports the user's main module again in every worker, sends
objects as pickles, sets no death signal, and a stopped one hangs its driver.
"""

import ctypes
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

from piper.errors import LaunchError
from piper.workers.processes import ClosedError, StopWatch, gone, how, read_exactly, stopped
from piper.workers.timeouts import TIMEOUTS

PRELOAD = "torch._dynamo"  # torch imports it when an optimizer is made, and it takes as long as torch itself
PROGRAM = (
    "import sys; from piper.workers.transport.fork_server import die_with, serve; "
    "die_with(int(sys.argv[2])); serve(int(sys.argv[1]), *sys.argv[3:])"
)
WORKER = "piper.workers.serve"  # the module whose `main` a worker runs
NOTICE = struct.Struct("!Bii")  # what happened, to which process, and how it ended
READY, FORKED, ENDED = range(3)
FORK = b"f"  # the request to start a worker
Main = Callable[[Sequence[int]], int]  # takes its descriptors; gives its exit code
MOST = 8  # descriptors that a worker may be given
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class ForkServer:
    """The handle of a fork server: starts it, lets it start workers, learns how they end, and ends it."""

    def __init__(self, module: str = WORKER, preload: str = PRELOAD) -> None:
        """Start the server; `module` holds the `main` of a worker, `preload` is imported once for all."""
        self.socket, there = socket.socketpair()
        words = [sys.executable, "-c", PROGRAM, str(there.fileno()), str(os.getpid()), module, preload]
        with there:
            self.process = start_with_thread(words, there.fileno())
        self.server = self.process.pid
        self.ready = False
        self.exits: dict[int, int] = {}

    def warm(self) -> None:
        """Wait until the server has imported what workers need. Idempotent."""
        if not self.ready:
            self._notice(READY)

    def fork(self, descriptors: Sequence[int]) -> int:
        """Start a worker that owns these descriptors. Return its process id."""
        self.warm()
        socket.send_fds(self.socket, [FORK], descriptors)
        process = self._notice(FORKED)
        self.exits.pop(process, None)  # of an earlier process with the same number
        return process

    def _notice(self, wanted: int) -> int:
        """Return the process of the next notice of a kind. The ends of others before it are remembered."""
        self.socket.settimeout(TIMEOUTS.fork_server_start)
        until, stop = monotonic() + TIMEOUTS.fork_server_start, StopWatch()
        try:
            while True:
                while not wait([self.socket], TIMEOUTS.process_poll):
                    if monotonic() > until:
                        raise TimeoutError(f"it does not answer within {TIMEOUTS.fork_server_start:g} s")
                    if stop.lasting(self.server, stopped(self.server)):
                        raise TimeoutError(f"process {self.server} is stopped by a signal")
                kind, pid = self._hear()
                if kind == wanted:
                    return pid
        except (ClosedError, TimeoutError) as error:
            raise no_process(error) from error

    def _hear(self) -> tuple[int, int]:
        """Read the next notice. Return what happened, and to which process."""
        kind, pid, status = NOTICE.unpack(read_exactly(self.socket, NOTICE.size, "the fork server"))
        if kind == ENDED:
            self.exits[pid] = status
        self.ready = self.ready or kind == READY
        return kind, pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a process ends."""
        return self.socket.fileno()

    def ended(self) -> Mapping[int, int]:
        """Return the exit codes of ended processes by process id. A signal is negative."""
        with suppress(ClosedError):
            while wait([self.socket], 0):
                self._hear()
        return self.exits

    def wait(self, pids: Sequence[int], timeout: float) -> None:
        """Wait until these processes have ended, but not for longer, even if the fork server is stopped."""
        until = monotonic() + timeout
        while not all(pid in self.ended() for pid in pids):
            silent = stopped(self.server) or gone(self.server)
            if monotonic() > until or (silent and all(map(gone, pids))):
                return
            wait([self.socket], TIMEOUTS.process_poll)

    def end(self, pids: Sequence[int]) -> None:
        """End these processes, stopped or not, and wait until they have ended."""
        for process in pids:
            if process not in self.ended():
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process, signal.SIGKILL)
        self.wait(pids, TIMEOUTS.process_end)

    def end_of(self, process: int) -> str | None:
        """Return how a process ended, in words. None: it lives.

        A process may be gone before the fork server, which knows how it ended, has had time to report that.
        """
        if process not in self.ended():
            if not gone(process):
                return None
            self.wait([process], TIMEOUTS.fork_server_end)
        return f"the process {how(self.exits[process])}" if process in self.exits else "the process has ended"

    def close(self) -> None:
        """End the fork server and every process it started, whatever state it is in."""
        self.socket.close()
        try:
            self.process.wait(0 if stopped(self.process.pid) else TIMEOUTS.fork_server_end)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers end with it
            self.process.wait(TIMEOUTS.fork_server_start)


def no_process(error: OSError) -> LaunchError:
    """Return the error of a fork server that starts no process."""
    return LaunchError(
        "no process can be started",
        by="launch",
        facts={"why": f"{type(error).__name__}: {error}"},
        hint="look at what the process printed; is the machine out of memory or processes?",
    )


def start_with_thread(words: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as it.

    The system sends a process the signal of its parent's death when the thread ends that started it.
    """
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), package]))  # the driver's modules too
    started: Future[subprocess.Popen[bytes]] = Future()

    def start() -> None:
        try:
            process = subprocess.Popen(
                words,
                pass_fds=[descriptor],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the driver, which then ends its workers
            )
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that asked
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    threading.Thread(target=start, name="fork server", daemon=True).start()
    return started.result()


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it ended before it was asked for


def serve(descriptor: int, module: str, preload: str) -> None:
    """Fork workers for the driver until it is gone. Runs in the process of the fork server."""
    end = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    importlib.import_module(preload)
    main: Main = importlib.import_module(module).main
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the driver, which saves first
    children: set[int] = set()
    notify(end, READY, os.getpid(), 0)
    try:
        while True:
            ready = wait([end, awake])  # any number of descriptors, unlike `select`
            if awake in ready:
                os.read(awake, 4096)
                for pid in [*children]:
                    has_ended, status = os.waitpid(pid, os.WNOHANG)
                    if has_ended:
                        children.remove(pid)
                        notify(end, ENDED, pid, os.waitstatus_to_exitcode(status))
            if end in ready:
                request, descriptors = asked(end)
                if request != FORK:
                    return
                pid = fork(main, [end.fileno(), awake, waker], descriptors)
                children.add(pid)
                notify(end, FORKED, pid, 0)
    finally:  # whatever happens, no worker outlives the fork server
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # stopped or not
        for pid in children:
            os.waitpid(pid, 0)
        os._exit(0)


def asked(end: socket.socket) -> tuple[bytes, list[int]]:
    """Return a request and the descriptors that came with it. An empty request: the driver is gone."""
    try:
        request, descriptors, _, _ = socket.recv_fds(end, 1, MOST)
    except ConnectionResetError:  # the driver went without reading every notice
        return b"", []
    return request, descriptors


def notify(end: socket.socket, what: int, pid: int, status: int) -> None:
    """Send a notice to the driver, if it is still there."""
    try:
        end.sendall(NOTICE.pack(what, pid, status))
    except OSError:
        return  # the driver is gone, which the loop is about to see


def fork(main: Main, ours: Sequence[int], descriptors: Sequence[int]) -> int:
    """Start a worker on its descriptors."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    die_with(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in ours:
        os.close(descriptor)
    code = 1
    try:
        code = main(descriptors)
    finally:  # whatever happens, a worker never returns into the loop of the fork server
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
