"""ProgressMarks where a device is in its plan, and tells what went wrong there as soon as it does."""

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from piper.plan.instr import Instr
from piper.runtime.comm.base import CommError, StoppedError
from piper.runtime.env import Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on a device."""

    device: int
    kind: Literal["error", "late"]  # late: it waited for others in vain
    what: str
    trace: str
    place: int | None = None  # the instruction, if it was one


def failure_of(device: int, error: BaseException, place: int | None = None) -> Failure:
    """An exception in words, because its own class may not be known elsewhere."""
    return Failure(
        device=device,
        kind="late" if isinstance(error, CommError) else "error",
        what=f"{type(error).__name__}: {error}",
        trace="".join(traceback.format_exception(error)),
        place=place,
    )


def new_cells(width: int) -> memoryview:
    """Cells to mark that nobody else shares."""
    return memoryview(bytearray(8 * width)).cast("q")


class Watcher:
    """Watches the instructions of one device."""

    def __init__(self, device: int, cells: memoryview, report: Callable[[Failure], None]) -> None:
        """`cells`: one for each stream, to be marked. `report` is called with the first failure, at once."""
        self.device, self.cells, self.report = device, cells, report
        self.streams: dict[str, int] = {}
        self.first: Exception | None = None
        self.lock = threading.Lock()

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """An instruction that marks its cell while it runs."""
        cells, cell, number = self.cells, self.streams.setdefault(ins.stream, len(self.streams)), place + 1

        def marked() -> None:
            cells[cell] = number
            try:
                run()
            except Exception as error:
                self.fail(error, place)
                raise
            cells[cell] = 0

        return marked

    def fail(self, error: Exception, place: int | None = None) -> None:
        """Report a failure, unless it is not the first, or only follows from one elsewhere."""
        with self.lock:
            if self.first is not None or isinstance(error, StoppedError):
                return
            self.first = error
        self.report(failure_of(self.device, error, place))
