"""Who ended a step? From what is seen of every device, one error that names the cause.

A worker that fails takes others with it: they wait for it in vain, and are often the first to complain. So
those who waited are followed, from each to the one it waited for, until there is one who waits for nobody.
"""

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from piper.errors import WorkerError
from piper.launchers.processes import ProcessStatus
from piper.plan.instr import COMMUNICATION, Instr
from piper.plan.plan import Plans
from piper.runtime.comm.base import CommError, StoppedError
from piper.runtime.env import Bound

Origins = Callable[[str], Sequence[str]]  # the directives that made a node, in words
MOST = 4  # victims that are listed


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """What is seen of a job when a step does not end as it should."""

    plans: Plans
    origins: Origins
    timeout: float
    statuses: Mapping[int, ProcessStatus]
    failures: Sequence[Failure] = field(default=())

    def instr(self, device: int, place: int) -> Instr:
        """An instruction of a device's plan."""
        return self.plans.of(device).instrs[place]

    @property
    def broken(self) -> bool:
        """Whether a device has ended or failed, so that the others run on until they need it."""
        ended = any(seen.ended is not None for seen in self.statuses.values())
        return ended or any(failure.kind == "error" for failure in self.failures)

    @property
    def at_work(self) -> bool:
        """Whether a device that neither ended nor failed does more than wait."""
        failed = {failure.device for failure in self.failures}
        return any(
            self.instr(device, place).op not in COMMUNICATION
            for device, seen in self.statuses.items()
            if device not in failed and seen.ended is None
            for place in seen.running
        )

    def place(self, device: int) -> int | None:
        """The instruction that says most about what a device does: work before waiting, early before late."""
        running = sorted(self.statuses[device].running)
        busy = [place for place in running if self.instr(device, place).op not in COMMUNICATION]
        return next(iter([*busy, *running]), None)


def blame(scene: JobSnapshot) -> WorkerError:
    """The one error that says why a step did not end."""
    explained = {failure.device for failure in scene.failures if failure.kind == "error"}
    for device, seen in scene.statuses.items():
        if seen.ended is not None and device not in explained:
            return told(scene, device, seen.ended, scene.place(device), HINTS["dead"])
    for failure in scene.failures:
        if failure.kind == "error":
            place = failure.place if failure.place is not None else scene.place(failure.device)
            return told(scene, failure.device, failure.what, place, HINTS["error"], failure.trace)
    for device, seen in scene.statuses.items():
        if seen.stopped:
            return told(
                scene, device, "the process is stopped by a signal", scene.place(device), HINTS["stopped"]
            )
    return late(scene)


def late(scene: JobSnapshot) -> WorkerError:
    """The error of a step in which nothing moves, and nobody has failed."""
    first = next(iter(scene.failures), None)
    device = first.device if first is not None else slowest(scene)
    device = follow(scene, device)
    place = scene.place(device)
    trace = first.trace if first is not None else None
    ins = None if place is None else scene.instr(device, place)
    if ins is None:
        what = f"nothing has run for {scene.timeout:g} s"
    elif ins.op in COMMUNICATION:
        what = f"waited {scene.timeout:g} s in {ins.node}, which never ended"
    else:
        what = f"{ins.node} has not ended, and others waited {scene.timeout:g} s for it"
    return told(scene, device, what, place, HINTS["late"], trace)


def slowest(scene: JobSnapshot) -> int:
    """A device that has not done its part of the step: one that works, else one that waits."""
    at_work = [device for device, seen in scene.statuses.items() if seen.running]
    busy = [
        device
        for device in at_work
        if any(scene.instr(device, p).op not in COMMUNICATION for p in scene.statuses[device].running)
    ]
    return next(iter([*busy, *at_work, *scene.statuses]))


def follow(scene: JobSnapshot, device: int) -> int:
    """From a device that waits to the one that all wait for."""
    seen = {device}
    while True:
        absent = [other for other in awaited(scene, device) if other not in seen]
        if not absent:
            return device
        device = absent[0]
        seen.add(device)


def awaited(scene: JobSnapshot, device: int) -> list[int]:
    """The devices that have not come to what a device waits in; nobody, if it is at work itself."""
    waits = [scene.instr(device, place) for place in scene.statuses[device].running]
    if any(ins.op not in COMMUNICATION for ins in waits):
        return []
    absent: list[int] = []
    for ins in waits:
        for other in partners(scene.plans, device, ins):
            there = [scene.instr(other, place) for place in scene.statuses[other].running]
            if not any(met.comm == ins.comm and met.node == ins.node for met in there):
                absent.append(other)
    return absent


def partners(plans: Plans, device: int, ins: Instr) -> list[int]:
    """The other devices that take part in an instruction."""
    if ins.comm is None:
        return []
    comm = plans.comms[ins.comm]
    if comm.kind == "pairs":
        mine, other = (0, 1) if ins.op == "send" else (1, 0)
        return [pair[other] for pair in comm.groups if pair[mine] == device]
    return [other for group in comm.groups if device in group for other in group if other != device]


HINTS = {
    "dead": "look for what ended it: the system's log names a process killed for want of memory",
    "error": "the worker's own traceback is below; on='inline' runs the same plan under a debugger",
    "stopped": "let it continue with SIGCONT within seconds, or start again",
    "late": "if this instruction is only slow, give launch a larger timeout",
}


def told(
    scene: JobSnapshot, device: int, what: str, place: int | None, hint: str, trace: str | None = None
) -> WorkerError:
    """The error that names a device and where it was."""
    facts: dict[str, str] = {}
    if place is None:
        facts["at"] = "no instruction of its plan"
    else:
        ins = scene.instr(device, place)
        facts["at"] = f"instruction {place}, {ins.op} on stream {ins.stream}: {ins.node}"
        if origins := scene.origins(ins.node):
            facts["made by"] = ", ".join(origins)
        facts["around"] = scene.plans.of(device).around(place)
    waiting = list(waiters(scene, device))
    if waiting:
        more = f" and {len(waiting) - MOST} more" if len(waiting) > MOST else ""
        facts["waiting"] = ", ".join(waiting[:MOST]) + more
    error = WorkerError(
        what, by=f"device {device} (process {scene.statuses[device].process})", facts=facts, hint=hint
    )
    if trace:
        error.add_note(trace)
    return error


def waiters(scene: JobSnapshot, culprit: int) -> list[str]:
    """The other devices that wait in some communication."""
    found = []
    for device in scene.statuses:
        place = scene.place(device)
        if device != culprit and place is not None and scene.instr(device, place).op in COMMUNICATION:
            found.append(f"device {device} in {scene.instr(device, place).node}")
    return found


def private_marks(width: int) -> memoryview:
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
