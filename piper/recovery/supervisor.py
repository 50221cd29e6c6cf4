"""Runs a driver in a process of its own, so that another one can take its place when it is killed.

The process is forked when the program is compiled, so a new driver costs neither an import nor a compilation.
It is forked by a thread that has done nothing before: OpenMP keeps its pool of threads for each thread that
uses it, and a fork of one that has a pool hangs when it computes. The thread lives as long as the process,
because the system ends the process with the thread that started it.
"""

import atexit
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from piper.launchers.processes import gone
from piper.launchers.transport.fork_server import die_with
from piper.launchers.transport.nameless_files import nameless_file

Handlers = dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None]  # of signals
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that are for the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a driver ended."""

    process: int
    code: int  # a signal is negative
    answer: bytes  # what it has returned. Empty: nothing


Ends = SimpleQueue[Ended | BaseException]


class Supervisor:
    """Runs one driver after another, and passes signals on to the one that runs.

    A driver has a process group of its own: Ctrl-C on a terminal comes to the supervisor alone, so that the
    driver gets each signal once.
    """

    def __init__(self) -> None:
        self.process: int | None = None  # the driver
        self.asked = self.preempted = False  # a driver was asked to end, by SIGTERM
        self.pending: list[int] = []  # signals to pass on
        self.handlers: Handlers | None = None  # those before signals are passed on

    def run(self, act: Callable[[], bytes], *, held: bool = False) -> Ended:
        """Return how a process ended that calls a function and returns its bytes.

        held: signals that come to it wait until it unblocks them, when it has handlers of its own.
        """
        sys.stdout.flush()  # else what is left to write there is written by both
        sys.stderr.flush()
        with self.passing() as handlers:
            found = self.start(act, handlers, held=held).get()
        if isinstance(found, BaseException):
            raise found
        return found

    def start(self, act: Callable[[], bytes], handlers: Handlers, *, held: bool = False) -> Ends:
        """Start a process that calls a function, with these handlers of signals. Its end comes in a queue."""
        ends: Ends = SimpleQueue()
        args = (act, handlers, held, ends)
        threading.Thread(target=self._fork, args=args, name="driver", daemon=True).start()
        return ends

    @contextmanager
    def passing(self) -> Iterator[Handlers]:
        """Pass signals on inside the block, to the next driver if none runs. Yield the handlers before it."""
        if self.handlers is not None:
            yield self.handlers  # a block outside of this one does so
            return
        numbers = [n for n in PASSED if signal.getsignal(n) != signal.SIG_IGN]  # as `nohup` leaves them
        before = {number: signal.signal(number, self._pass) for number in numbers}
        if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        self.handlers = before
        try:
            yield before
        finally:
            self.handlers = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)
        self._flush()

    def _flush(self) -> None:
        """Pass on the signals that came, once there is a driver. One that has ended does not get them."""
        while self.pending and (process := self.process) is not None and not gone(process):
            number = self.pending.pop(0)
            self.asked, self.preempted = True, self.preempted or number == signal.SIGTERM
            os.kill(process, number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stop with the driver on Ctrl-Z, and go on with it."""
        for process, way in (
            (self.process, signal.SIGSTOP),
            (os.getpid(), signal.SIGSTOP),
            (self.process, signal.SIGCONT),
        ):
            if process is not None:
                os.kill(process, way)

    def _fork(
        self,
        act: Callable[[], bytes],
        handlers: Handlers,
        held: bool,
        ends: Ends,
    ) -> None:
        """Fork a driver and wait for its end."""
        file = nameless_file(0)
        os.ftruncate(file, 0)
        supervisor, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of any fork beside threads
                process = os.fork()
        except OSError as error:
            ends.put(error)
            return
        if not process:
            drive(act, handlers, {*mask, *PASSED} if held else mask, file, supervisor)
        self.process = process
        self._flush()
        os.waitid(
            os.P_PID, process, os.WEXITED | os.WNOWAIT
        )  # its number stays taken while signals are passed
        self.process = None
        _, status = os.waitpid(process, 0)
        answer = os.pread(file, os.fstat(file).st_size, 0)
        os.close(file)
        ends.put(Ended(process=process, code=os.waitstatus_to_exitcode(status), answer=answer))


def drive(
    act: Callable[[], bytes],
    handlers: Handlers,
    mask: set[int | signal.Signals],
    file: int,
    supervisor: int,
) -> NoReturn:
    """Call a function in a process that was forked for it, write what it returns into a file, and end.

    mask: the signals that stay blocked.
    """
    code = 1
    try:
        die_with(supervisor)
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a group in the background may not read a terminal
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        answer = act()
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()  # as at the end of any process: loggers of the user's wait for it
        os.pwrite(file, answer, 0)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  it is shown, and is the end of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
