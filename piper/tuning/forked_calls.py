"""Makes calls at the same time: the first in this process, each other in a process forked for it.

A forked process has all that this one has recorded, and ends with its call.
"""

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, NoReturn, TypeVar

from piper.errors import WorkerError

T = TypeVar("T")


class ForkedCall(Generic[T]):
    """A call that a forked process makes."""

    def __init__(self, call: Callable[[], T]) -> None:
        """Start the process."""
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _make(call, writing)
        os.close(writing)
        self.result_file = os.fdopen(reading, "rb")

    def result(self) -> T | None:
        """Wait for the result. None: the call raised an exception. Make it again to see which."""
        with self.result_file:
            written = self.result_file.read()
        pid, self.pid = self.pid, 0
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            raise WorkerError(
                f"a process that evaluated a candidate was killed by {signal.Signals(-status).name}",
                by="tune",
                hint="often for want of memory: try --workers 1, or tune(..., workers=1)",
            )
        result: T | None = pickle.loads(written) if not status else None
        return result

    def end(self) -> None:
        """End the process if it runs. Idempotent."""
        self.result_file.close()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _make(call: Callable[[], object], writing: int) -> NoReturn:
    """Make a call in the forked process, write its result and exit, without any clean-up of the parent's."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C too, and ends this process
        with os.fdopen(writing, "wb") as file:
            file.write(pickle.dumps(call()))
        status = 0
    finally:
        os._exit(status)


def run_together(calls: Sequence[Callable[[], T]]) -> list[T | None]:
    """Return the results of calls. An exception of the first is raised; of another its result is None."""
    others: list[ForkedCall[T]] = []
    try:
        for call in calls[1:]:
            others.append(ForkedCall(call))
        first = calls[0]()
        return [first, *(other.result() for other in others)]
    finally:
        for other in others:
            other.end()
