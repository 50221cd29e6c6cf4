"""The driver of a job: starts its workers, asks them for results, and notices when one is lost."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import cast

from torch import Tensor

from piper.errors import WorkerError
from piper.launchers.base import (
    Readable,
    ended,
    streams_of,
    unread_values,
)
from piper.launchers.checkpointing import Checkpoints
from piper.launchers.failures import Failure, JobSnapshot, blame
from piper.launchers.messages import (
    PATIENCE,
    Assignment,
    BatchSlicer,
    Call,
    Heartbeat,
    Preparation,
    ProgramBatch,
    pack_setup,
)
from piper.launchers.processes import ProcessStatus, StopWatch, running, stopped
from piper.launchers.run_programs import Prepared, ProgramRun
from piper.launchers.transport.channel import Channel, ClosedError
from piper.launchers.transport.shared_memory import TensorEntry, layout
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.worker import Options, Sums

POLL = 0.2  # seconds between two looks at whether anything moves
LOSS = 5.0  # seconds by which the end of a process may follow the first error that it causes
SETTLE = 2.0  # seconds that workers may take to reach the instruction that needs the failed worker
STILL = 0.05  # seconds between two snapshots of the job
LOOKS = 3  # snapshots that must agree


class WorkerGroup(ABC):
    """The workers of a job, one for each device."""

    leaving = False  # whether the system has asked a worker to end
    protects = False  # workers keep versions of their state in memory

    @abstractmethod
    def ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        """Call workers, each with its argument, and return their answers. One error ends all workers."""

    def running(self, program: ProgramLike) -> AbstractContextManager[None]:
        """Take note inside the block that workers run another program than the one they train with."""
        return nullcontext()

    def sharing(self, step: int) -> AbstractContextManager[None]:
        """Let all workers reach the versions of a step inside the block, wherever they lie."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """End every worker. Idempotent."""


class SocketWorkerGroup(WorkerGroup):
    """Workers that answer over channels. A launcher adds how they are started and watched."""

    grace = 0.5  # seconds by which the cause of a failure may follow its first victim

    def __init__(self, program: ProgramLike, options: Options) -> None:
        self.program, self.options = program, options
        self.current = program  # what workers run now
        self.devices = program.plans.devices
        self.stall = options.timeout  # seconds without any progress after which the job has stalled
        self.packed: bytes | None = None  # the setup as a message, where an earlier group has made it
        self.channels: dict[int, Channel] = {}
        self.processes: dict[int, int] = {}  # process ids by device
        self.marks: dict[int, memoryview] = {}  # progress of the devices on this machine
        self.failures: list[Failure] = []
        self.silent: set[int] = set()  # devices whose channel is closed or stuck
        self.asked = monotonic()
        self.waiting: set[int] = set()  # devices that work on a call, and send heartbeats while they do
        self.heard: dict[int, float] = {}  # time of the last message of each device
        self.seen: list[bytes] = []  # marks at the last look
        self.stops = StopWatch()

    @abstractmethod
    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, held: ExitStack
    ) -> None:
        """Start a worker for every device and open its channel.

        weights: the initial values, laid out as `index` says. width: the most streams of any device.
        held: closes, once all workers are ready, what is needed only until then.
        """

    @abstractmethod
    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        """Return the first message to a worker."""

    def start(self) -> "RemoteRun":
        """Start all workers, send each its assignment, and wait until all have met."""
        program = self.program
        needed = setup_of(program)
        weights = needed.build_code(
            program.plans, lambda: {} if self.options.blank else initial_tensors(program)
        )
        self.packed = setup = self.packed or pack_setup(needed)
        index = layout(weights)
        with ExitStack() as held:
            self.connect(weights, index, streams_of(program.plans), held)
            for device in self.devices:
                self.send(device, self.assignment(device, setup, weights, index))
            self.gather(set(self.devices), max(PATIENCE, self.options.timeout))
        return self.run(unread_values(program, weights))

    def run(self, unread: dict[str, Tensor]) -> "RemoteRun":
        """Return the run of the started workers."""
        return RemoteRun(self.program, self, unread, self.options)

    @abstractmethod
    def ended(self) -> Mapping[int, str]:
        """Return the devices whose process has ended, and how it ended."""

    def stopped(self) -> set[int]:
        """Return the devices whose process has been stopped by a signal for several seconds."""
        pids = {device: self.processes[device] for device in self.marks if device in self.processes}
        return {device for device, pid in pids.items() if self.stops.lasting(pid, stopped(pid))}

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what is known of every device's process."""
        ended = self.ended()
        return {
            device: ProcessStatus(
                process=self.processes[device],
                running=running(self.marks.get(device, ())),
                ended=ended.get(device),
                stopped=device in self.marks and device not in ended and stopped(self.processes[device]),
            )
            for device in self.devices
        }

    def moving(self) -> bool:
        """Return whether any device has moved on in its plan since the last call."""
        before, self.seen = self.seen, [bytes(marks) for marks in self.marks.values()]
        return before != self.seen

    def bells(self) -> Sequence[Readable]:
        """Return objects that become readable when a process ends."""
        return ()

    @contextmanager
    def running(self, program: ProgramLike) -> Iterator[None]:
        self.current = program
        try:
            yield
        finally:
            self.current = self.program

    def ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        self.asked = monotonic()
        for device, argument in arguments.items():
            self.send(device, (call, argument))
            self.heard[device] = monotonic()
        self.waiting = set(arguments)
        try:
            patient = call == "prepare"  # a worker that loads another program runs no instructions
            return self.gather(self.waiting, max(PATIENCE, self.stall) if patient else self.stall)
        finally:
            self.waiting = set()

    def send(self, device: int, value: object) -> None:
        """Send one message to a worker."""
        channel = self.channels[device]
        channel.lost = lambda: device in self.stopped()
        try:
            channel.send(value)
        except (ClosedError, TimeoutError):  # it is dead or stopped, and the snapshot will show it
            self.silent.add(device)
            raise self.blamed() from None

    def gather(self, waiting: set[int], timeout: float) -> dict[int, object]:
        """Return the answers of these devices. Give up when none has moved for `timeout` seconds."""
        answers: dict[int, object] = {}
        moved = monotonic()
        while waiting:
            ready, before = self._ready(waiting), len(answers)
            for device in ready:
                answer = self._hear(device)
                if not isinstance(answer, Heartbeat):
                    answers[device] = answer
                    waiting.discard(device)
            if self.failures or self.silent or (not ready and (self.ended() or self.stopped())):
                raise self.blamed()
            if len(answers) > before or self.moving():
                moved = monotonic()
            elif monotonic() - moved > timeout + POLL:
                raise self.blamed()
        return answers

    def _ready(self, devices: set[int], timeout: float = POLL) -> list[int]:
        """Return the devices whose message has come. The wait ends early when a process ends."""
        ends: dict[object, int] = {self.channels[device]: device for device in devices}
        return [ends[end] for end in wait([*ends, *self.bells()], timeout) if end in ends]  # type: ignore[list-item]

    def _hear(self, device: int) -> object:
        try:
            answer = self.channels[device].recv()
        except (ClosedError, TimeoutError):
            self.silent.add(device)
            return None
        self.heard[device] = monotonic()
        if isinstance(answer, Failure):
            self.failures.append(answer)
        if isinstance(answer, Heartbeat) and answer.leaving:
            self.leaving = True
        return answer

    def blamed(self) -> WorkerError:
        """Return the error that names the cause, after a moment in which the cause may show."""
        early = monotonic() - self.asked < self.stall  # then no worker was late, but one is gone
        until = monotonic() + (max(self.grace, LOSS) if early else self.grace)
        while monotonic() < until and not self.ended() and not self.stopped():
            if any(failure.kind == "error" for failure in self.failures):
                break
            self._listen(POLL)
        return blame(self.settled())

    def _listen(self, timeout: float) -> None:
        """Read the messages of workers that have not yet reported a failure."""
        done = self.silent | {failure.device for failure in self.failures}
        for device in self._ready(set(self.devices) - done, timeout):
            self._hear(device)

    def settled(self) -> JobSnapshot:
        """Return a snapshot in which the remaining workers have reached what they need of the failed one.

        Before that, which worker waits for which depends on the moment of the snapshot.
        """
        snapshot, alike, until = self.snapshot(), 1, monotonic() + SETTLE
        while alike < LOOKS and snapshot.broken and monotonic() < until:
            sleep(STILL)
            before, snapshot = snapshot, self.snapshot()
            alike = alike + 1 if snapshot.statuses == before.statuses and not snapshot.at_work else 1
        return snapshot

    def snapshot(self) -> JobSnapshot:
        """Return the state of the job now. What an ended process has sent is read after its end is seen."""
        statuses = self.statuses()
        self._listen(0)
        return JobSnapshot(
            plans=self.current.plans,
            origins=self.current.origins,
            timeout=self.stall,
            statuses=statuses,
            failures=self.failures,
        )


class RemoteRun(ProgramRun):
    """A job whose devices are processes."""

    def __init__(
        self, program: ProgramLike, group: WorkerGroup, unread: dict[str, Tensor], options: Options
    ) -> None:
        """Drive the workers of a program; `unread`: initial parameters and buffers that no device holds."""
        super().__init__(program, options)
        self.group, self.unread = group, unread
        self.busy: dict[int, float] = {}  # seconds that each device computed in the last step
        self.slicers = {0: BatchSlicer(program.plans)}  # of all programs, by their numbers
        self.open = True
        self.checkpoints = Checkpoints(program, self.devices, self._ask, unread, self.close)

    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        if not self.open:
            raise ended()
        try:
            return self.group.ask(call, arguments)
        except BaseException as error:
            self.checkpoints.abandon()  # what workers still answer is not the answer to the next call
            if isinstance(error, WorkerError):
                self.close()
            raise

    def _step(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        answers = self._run("step", ready, batch)
        self.busy = {device: sums.busy for device, sums in answers.items()}
        self.checkpoints.poll()
        return answers[self.devices[0]]

    def _forward(self, ready: Prepared, batch: Mapping[str, Tensor]) -> Sums:
        return self._run("evaluate", ready, batch)[self.devices[0]]

    def _run(self, call: Call, ready: Prepared, batch: Mapping[str, Tensor]) -> dict[int, Sums]:
        """Let all workers run a program on their rows of a batch."""
        slicer = self.slicers[ready.number]
        given = {d: ProgramBatch(number=ready.number, fields=slicer.cut(batch, d)) for d in self.devices}
        with self.group.running(ready.program):
            return cast("dict[int, Sums]", self._ask(call, given))

    def _prepare(self, made: Prepared, *, trains: bool) -> None:
        setup = pack_setup(setup_of(made.program))
        given = Preparation(number=made.number, setup=setup, buffers=made.buffers, trains=trains)
        self.slicers[made.number] = BatchSlicer(made.program.plans)
        self._ask("prepare", dict.fromkeys(self.devices, given))

    def protect(self) -> None:
        """Copy the state into memory that outlives workers. After each step they do so by themselves."""
        if self.group.protects:
            self._ask("protect", dict.fromkeys(self.devices))

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        """Take the state after a step from memory; `unread`: the values that no device holds."""
        with self.group.sharing(step):
            self._ask("restore", dict.fromkeys(self.devices, step))
        self.unread.update(unread)

    def leaving(self) -> bool:
        """Return whether the system has asked a worker to end, by SIGTERM."""
        return self.group.leaving

    def close(self) -> None:
        """End every worker. Idempotent."""
        try:
            if self.open:
                self.checkpoints.settle()
        finally:
            self.open = False
            self.group.close()
