"""Finds the cause of a failed step: one error that names the device at fault and its instruction.

A worker that fails takes others with it: they wait for it until they time out, and often report first. So the
search follows each waiting device to the one it waits for, until it reaches one that waits for none.
"""

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch

from piper.errors import PiperError, WorkerError
from piper.plan.instr import Instr
from piper.plan.ops import COMMUNICATION
from piper.plan.plan import Plans
from piper.process.usercode import failed_line
from piper.runtime.comm.base import CommError, StoppedError
from piper.runtime.context import Bound
from piper.runtime.recorders import DeviceTimes
from piper.workers.processes import STREAMS, ProcessStatus

MOST = 4  # victims that are listed
Kind = Literal["dead", "error", "stopped", "late"]  # late: it waited for another device until the timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure: an error or a late wait that a worker reports, or what its process shows."""

    device: int
    kind: Kind
    what: str
    trace: str = ""
    place: int | None = None  # the instruction, if it was one
    line: str | None = None  # of the user's code, if an operation of a chunk failed


def failure_of(device: int, error: BaseException, place: int | None = None) -> Failure:
    """Return an exception as text, because the driver may not know its class."""
    return Failure(
        device=device,
        kind="late" if isinstance(error, CommError) else "error",
        what=in_one_line(error),
        trace="".join(traceback.format_exception(error)),
        place=place,
        line=failed_line(error),
    )


def in_one_line(error: BaseException) -> str:
    """Return an exception as the first line of an error about its worker."""
    if not isinstance(error, PiperError):
        return f"{type(error).__name__}: {error}"
    why = f": {error.facts['why']}" if "why" in error.facts else ""
    return f"{error.by}: {error.what}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """The state of a job at one moment: the status of every process and the reported failures."""

    plans: Plans
    origins: Callable[[str], Sequence[str]]  # the directives that made a node, in words
    timeout: float
    statuses: Mapping[int, ProcessStatus]
    failures: Sequence[Failure] = field(default=())

    def instr(self, device: int, place: int) -> Instr:
        """Return an instruction of a device's plan."""
        return self.plans.of(device).instrs[place]

    @property
    def broken(self) -> bool:
        """Return whether a device has ended or failed. The others then run until they need it."""
        ended = any(seen.ended is not None for seen in self.statuses.values())
        return ended or any(failure.kind == "error" for failure in self.failures)

    @property
    def at_work(self) -> bool:
        """Return whether a device that neither ended nor failed does more than wait."""
        failed = {failure.device for failure in self.failures}
        alive = {device for device, seen in self.statuses.items() if seen.ended is None}
        return any(map(self.computing, alive - failed))

    def computing(self, device: int) -> list[int]:
        """Return the instructions that a device is at and that wait for no other device."""
        running = sorted(self.statuses[device].running)
        return [place for place in running if self.instr(device, place).op not in COMMUNICATION]

    def place(self, device: int) -> int | None:
        """Return the instruction that best describes a device: computing before waiting."""
        return next(iter([*self.computing(device), *sorted(self.statuses[device].running)]), None)


def blame(snapshot: JobSnapshot) -> WorkerError:
    """Return the error that names why a step did not end."""
    explained = {failure.device for failure in snapshot.failures if failure.kind == "error"}
    for device, seen in snapshot.statuses.items():
        if seen.ended is not None and device not in explained:
            return worker_error(snapshot, Failure(device=device, kind="dead", what=seen.ended))
    for failure in snapshot.failures:
        if failure.kind == "error":
            return worker_error(snapshot, failure)
    for device, seen in snapshot.statuses.items():
        if seen.stopped:
            what = "the process is stopped by a signal"
            return worker_error(snapshot, Failure(device=device, kind="stopped", what=what))
    return late(snapshot)


def late(snapshot: JobSnapshot) -> WorkerError:
    """Return the error of a step in which no device moves and none has failed."""
    first = next(iter(snapshot.failures), None)
    device = follow(snapshot, slowest(snapshot) if first is None else first.device)
    place = snapshot.place(device)
    ins = None if place is None else snapshot.instr(device, place)
    if ins is None:
        what = f"nothing has run for {snapshot.timeout:g} s"
    elif ins.op in COMMUNICATION:
        what = f"waited {snapshot.timeout:g} s in {ins.node}, which never ended"
    else:
        what = f"{ins.node} has not ended, and others waited {snapshot.timeout:g} s for it"
    trace = "" if first is None else first.trace
    return worker_error(snapshot, Failure(device=device, kind="late", what=what, trace=trace))


def slowest(snapshot: JobSnapshot) -> int:
    """Return a device that has not finished the step: one that computes, else one that waits."""
    at_work = [device for device, seen in snapshot.statuses.items() if seen.running]
    return next(iter([*filter(snapshot.computing, at_work), *at_work, *snapshot.statuses]))


def follow(snapshot: JobSnapshot, device: int) -> int:
    """Return the device that a waiting device waits for, directly or through others."""
    seen = {device}
    while True:
        absent = [other for other in awaited(snapshot, device) if other not in seen]
        if not absent:
            return device
        device = absent[0]
        seen.add(device)


def awaited(snapshot: JobSnapshot, device: int) -> list[int]:
    """Return the devices that have not reached the communication in which `device` waits, if it does."""
    at = {d: [snapshot.instr(d, p) for p in seen.running] for d, seen in snapshot.statuses.items()}
    if snapshot.computing(device):
        return []
    return [
        other
        for ins in at[device]
        for other in partners(snapshot.plans, device, ins)
        if all((met.comm, met.node) != (ins.comm, ins.node) for met in at[other])
    ]


def partners(plans: Plans, device: int, ins: Instr) -> list[int]:
    """Return the other devices that take part in an instruction."""
    if ins.comm is None:
        return []
    return [other for other in plans.comms[ins.comm].group_of(device, ins.op) if other != device]


HINTS: Mapping[Kind, str] = {
    "dead": "look for what ended it: the system's log names a process killed for want of memory",
    "error": "the worker's own traceback is below; on='inline' runs the same plan under a debugger",
    "stopped": "let it continue with SIGCONT within seconds, or start again",
    "late": "if this instruction is only slow, give launch a larger timeout",
}


def worker_error(snapshot: JobSnapshot, failure: Failure) -> WorkerError:
    """Return the error that names a device, the instruction it was at, and the user's line behind that."""
    device, place = failure.device, failure.place
    if place is None:
        place = snapshot.place(device)
    facts: dict[str, str] = {} if failure.line is None else {"line": failure.line}
    if place is None:
        facts["at"] = "no instruction of its plan"
    else:
        ins = snapshot.instr(device, place)
        facts["at"] = f"instruction {place}, {ins.op} on stream {ins.stream}: {ins.node}"
        if origins := snapshot.origins(ins.node):
            facts["made by"] = ", ".join(origins)
        facts["around"] = snapshot.plans.of(device).around(place)
    waits = {d: p for d in snapshot.statuses if d != device and (p := snapshot.place(d)) is not None}
    at = {other: snapshot.instr(other, p) for other, p in waits.items()}
    waiting = [f"device {other} in {ins.node}" for other, ins in at.items() if ins.op in COMMUNICATION]
    if waiting:
        more = f" and {len(waiting) - MOST} more" if len(waiting) > MOST else ""
        facts["waiting"] = ", ".join(waiting[:MOST]) + more
    error = WorkerError(
        failure.what,
        by=f"device {device} (process {snapshot.statuses[device].process})",
        facts=facts,
        hint=HINTS[failure.kind],
    )
    error.kind, error.device, error.place = failure.kind, device, place
    if failure.trace:
        error.add_note(failure.trace)
    return error


def private_marks() -> memoryview:
    """Return marks that no other process shares."""
    return memoryview(bytearray(8 * STREAMS)).cast("q")


class Watcher:
    """Marks which instructions of one device run, and reports its first failure."""

    def __init__(
        self,
        device: int,
        marks: memoryview,
        report: Callable[[Failure], None],
        accelerator: torch.device | None = None,
    ) -> None:
        """Watch one device; `marks`: a number for each stream. `report`: takes the first failure, once."""
        self.device, self.marks, self.report = device, marks, report
        # On an accelerator, which is issued instructions long before they run, events measure their time.
        self.device_times = DeviceTimes(accelerator) if accelerator is not None else None
        self.streams: dict[str, int] = {}
        self.busy = [0.0] * len(marks)  # seconds of each stream that were not spent on communication
        self.first: Exception | None = None
        self.lock = threading.Lock()

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Return an instruction that marks its stream while it runs."""
        marks, number = self.marks, place + 1
        # Streams beyond those that have a mark share the last one.
        mark = self.streams.setdefault(ins.stream, min(len(self.streams), len(marks) - 1))

        def marked() -> None:
            marks[mark] = number
            try:
                run()
            except Exception as error:
                self.fail(error, place)
                raise
            marks[mark] = 0

        if ins.op in COMMUNICATION:
            return marked
        if self.device_times is not None:
            return self.device_times.watch(place, marked)
        busy = self.busy

        def timed() -> None:
            began = perf_counter()
            marked()
            busy[mark] += perf_counter() - began

        return timed

    def show(self, places: Mapping[str, int]) -> None:
        """Mark the instruction that each stream is at, where all of a step is issued before it runs."""
        for stream, mark in self.streams.items():
            self.marks[mark] = places.get(stream, -1) + 1

    def take_busy(self) -> float:
        """Return the seconds that this device has computed since the last call."""
        if self.device_times is not None:
            return self.device_times.take()
        total = sum(self.busy)
        self.busy[:] = [0.0] * len(self.busy)
        return total

    def fail(self, error: Exception, place: int | None = None) -> None:
        """Report a failure, unless it is not the first or only follows from one on another device."""
        with self.lock:
            if self.first is not None or isinstance(error, StoppedError):
                return
            self.first = error
        self.report(failure_of(self.device, error, place))
