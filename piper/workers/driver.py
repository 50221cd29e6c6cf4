"""The driver of workers that are processes: starts them, asks them, and notices when one is lost."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from time import monotonic, sleep
from typing import TypeVar, cast

from torch import Tensor

from piper.errors import WorkerError
from piper.runtime.setup import ProgramLike, Setup, initial_tensors, setup_of
from piper.runtime.worker import Options
from piper.workers.answers import WorkerAnswers
from piper.workers.blame import Failure, JobSnapshot, blame
from piper.workers.group import Readable, WorkerGroup, streams_of, unread_values
from piper.workers.messages import Assignment, Leaving, pack_setup
from piper.workers.processes import ProcessStatus, StopWatch, running, stopped
from piper.workers.serve import WorkerServer
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.shared_memory import TensorEntry, layout
from piper.workers.transport.sockets import ClosedError

A = TypeVar("A")
R = TypeVar("R")
LOOKS = 3  # snapshots that must agree


class SocketWorkerGroup(WorkerGroup):
    """Workers that answer over channels. A launcher adds how they are started and watched."""

    grace = TIMEOUTS.cause_follows

    def __init__(self, program: ProgramLike, options: Options) -> None:
        super().__init__(program, options)
        self.packed: bytes | None = None  # the setup as a message, where an earlier group has made it
        self.channels: dict[int, Channel] = {}
        self.processes: dict[int, int] = {}  # process ids by device
        self.marks: dict[int, memoryview] = {}  # progress of the devices on this machine
        self.failures: list[Failure] = []
        self.silent: set[int] = set()  # devices whose channel is closed or stuck
        self.asked = monotonic()
        self.seen: list[bytes] = []  # marks at the last look
        self.stops = StopWatch()

    @abstractmethod
    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, startup: ExitStack
    ) -> None:
        """Start a worker for every device and open its channel.

        weights: the initial values, laid out as `index` says. width: the most streams of any device.
        startup: closes, once all workers are ready, what is needed only until then.
        """

    @abstractmethod
    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        """Return the first message to a worker."""

    def start(self) -> dict[str, Tensor]:
        """Start all workers, send each its assignment, and wait until all have met."""
        program = self.program
        needed = setup_of(program)
        weights = needed.build_code(
            program.plans, lambda: {} if self.options.blank else initial_tensors(program)
        )
        self.packed = setup = self.packed or pack_setup(needed)
        index = layout(weights)
        with ExitStack() as startup:
            self.connect(weights, index, streams_of(program.plans), startup)
            for device in self.devices:
                self.send(device, self.assignment(device, setup, weights, index))
            self.gather(set(self.devices), max(TIMEOUTS.meeting, self.options.timeout))
        return unread_values(program, weights)

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

    def exit_notifiers(self) -> Sequence[Readable]:
        """Return objects that become readable when a process ends."""
        return ()

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        return cast("dict[int, R]", self._ask(call.__name__, arguments, self.stall))

    def prepare(self, number: int, setup: Setup, buffers: Mapping[str, Tensor], *, trains: bool) -> None:
        given = (number, pack_setup(setup), buffers, trains)
        # A worker that loads another program runs no instructions.
        timeout = max(TIMEOUTS.meeting, self.stall)
        self._ask(WorkerServer.prepare.__name__, dict.fromkeys(self.devices, given), timeout)

    def _ask(self, call: str, arguments: Mapping[int, object], timeout: float) -> dict[int, object]:
        """Call workers, each with its argument. Give up when none has moved for `timeout` seconds."""
        self.asked = monotonic()
        for device, argument in arguments.items():
            self.send(device, (call, argument))
        return self.gather(set(arguments), timeout)

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
                if not isinstance(answer, Leaving):
                    answers[device] = answer
                    waiting.discard(device)
            if self.failures or self.silent or (not ready and (self.ended() or self.stopped())):
                raise self.blamed()
            if len(answers) > before or self.moving():
                moved = monotonic()
            elif monotonic() - moved > timeout + TIMEOUTS.driver_poll:
                raise self.blamed()
        return answers

    def _ready(self, devices: set[int], timeout: float = TIMEOUTS.driver_poll) -> list[int]:
        """Return the devices whose message has come. The wait ends early when a process ends."""
        ends: dict[object, int] = {self.channels[device]: device for device in devices}
        return [ends[end] for end in wait([*ends, *self.exit_notifiers()], timeout) if end in ends]  # type: ignore[list-item]

    def _hear(self, device: int) -> object:
        try:
            answer = self.channels[device].recv()
        except (ClosedError, TimeoutError):
            self.silent.add(device)
            return None
        if isinstance(answer, Failure):
            self.failures.append(answer)
        self.leaving = self.leaving or isinstance(answer, Leaving)
        return answer

    def blamed(self) -> WorkerError:
        """Return the error that names the cause, after a moment in which the cause may show."""
        early = monotonic() - self.asked < self.stall  # then no worker was late, but one is gone
        until = monotonic() + (max(self.grace, TIMEOUTS.end_follows) if early else self.grace)
        while monotonic() < until and not self.ended() and not self.stopped():
            if any(failure.kind == "error" for failure in self.failures):
                break
            self._listen(TIMEOUTS.driver_poll)
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
        snapshot, alike, until = self.snapshot(), 1, monotonic() + TIMEOUTS.victims_settle
        while alike < LOOKS and snapshot.broken and monotonic() < until:
            sleep(TIMEOUTS.snapshot_pause)
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
