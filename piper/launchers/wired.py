"""Workers at the ends of sockets: asked all at once, heard as they answer, watched while they do not."""

import select
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Protocol

from piper.errors import WorkerError
from piper.launchers.driver import WorkerGroup, devices_of
from piper.launchers.failures import JobSnapshot, ProcessStatus, blame
from piper.launchers.messages import Call, Heartbeat
from piper.launchers.transport.channel import Channel, ClosedError
from piper.launchers.watch import Failure
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

POLL = 0.2  # seconds between looks at whether anything moves
LOSS = 5.0  # seconds that the end of a process may come after a worker has noticed it
SETTLE = 2.0  # seconds that workers may take to come to where they need the one that failed
STILL = 0.05  # seconds between two looks at whether they have
LOOKS = 3  # looks that must agree


class Readable(Protocol):
    """What can be waited for."""

    def fileno(self) -> int: ...


class SocketWorkerGroup(WorkerGroup):
    """Workers that answer over channels. Whoever starts them adds how they are seen from outside."""

    grace = 0.5  # seconds that the cause of a failure may come after its first victim

    def __init__(self, program: ProgramLike, options: Options) -> None:
        self.program, self.options = program, options
        self.devices = devices_of(program.plans)
        self.channels: dict[int, Channel] = {}
        self.failures: list[Failure] = []
        self.silent: set[int] = set()  # devices whose channel is closed or stuck
        self.asked = monotonic()
        self.waiting: set[int] = set()  # devices that work on a call, and send beats while they do
        self.heard: dict[int, float] = {}  # when a device was last heard

    @abstractmethod
    def ended(self) -> Mapping[int, str]:
        """The devices whose process has ended, and how."""

    @abstractmethod
    def statuses(self) -> dict[int, ProcessStatus]:
        """What is seen of every device."""

    @abstractmethod
    def moving(self) -> bool:
        """Whether any device is seen to have moved on in its plan since the last look."""

    def stopped(self) -> set[int]:
        """Return the devices whose process has been stopped by a signal for several seconds."""
        return set()

    def bells(self) -> Sequence[Readable]:
        """What rings when a process ends."""
        return ()

    def ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        self.asked = monotonic()
        for device, argument in arguments.items():
            self.send(device, (call, argument))
            self.heard[device] = monotonic()
        self.waiting = set(arguments)
        try:
            return self.gather(self.waiting, self.options.timeout)
        finally:
            self.waiting = set()

    def send(self, device: int, value: object) -> None:
        """Send a worker something."""
        channel = self.channels[device]
        channel.lost = lambda: device in self.stopped()
        try:
            channel.send(value)
        except (ClosedError, TimeoutError):  # it is dead or stopped, and the scene will show it
            self.silent.add(device)
            raise self.blamed() from None

    def gather(self, waiting: set[int], timeout: float) -> dict[int, object]:
        """The answers of these devices, as long as any of them moves."""
        answers: dict[int, object] = {}
        moved = monotonic()
        while waiting:
            ready = self._ready(waiting)
            before = len(answers)
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

    def _ready(self, devices: set[int], wait: float = POLL) -> list[int]:
        """The devices that have something to say, after a wait that ends early when a process does."""
        ends = {self.channels[device].fileno(): device for device in devices}
        found, _, _ = select.select([*ends, *(bell.fileno() for bell in self.bells())], [], [], wait)
        return [ends[end] for end in found if end in ends]

    def _hear(self, device: int) -> object:
        try:
            answer = self.channels[device].recv()
        except (ClosedError, TimeoutError):
            self.silent.add(device)
            return None
        self.heard[device] = monotonic()
        if isinstance(answer, Failure):
            self.failures.append(answer)
        return answer

    def blamed(self) -> WorkerError:
        """The error that names the cause, after a moment in which it may come to light."""
        early = monotonic() - self.asked < self.options.timeout  # then nobody was late, but somebody is gone
        until = monotonic() + (max(self.grace, LOSS) if early else self.grace)
        while monotonic() < until and not self.ended() and not self.stopped():
            if any(failure.kind == "error" for failure in self.failures):
                break
            self._listen(POLL)
        return blame(self.settled())

    def _listen(self, wait: float) -> None:
        """Hear those who have not yet said what went wrong."""
        done = self.silent | {failure.device for failure in self.failures}
        for device in self._ready(set(self.devices) - done, wait):
            self._hear(device)

    def settled(self) -> JobSnapshot:
        """The scene once those who go on have come to where they need the one that failed.

        Until then, who waits for whom depends on the moment of the look.
        """
        scene, alike, until = self.scene(), 1, monotonic() + SETTLE
        while alike < LOOKS and scene.broken and monotonic() < until:
            sleep(STILL)
            before, scene = scene, self.scene()
            alike = alike + 1 if scene.statuses == before.statuses and not scene.at_work else 1
        return scene

    def scene(self) -> JobSnapshot:
        """What is seen now, and what was said: whoever is seen to have ended has said it before."""
        statuses = self.statuses()
        self._listen(0)
        return JobSnapshot(
            plans=self.program.plans,
            origins=self.program.origins,
            timeout=self.options.timeout,
            statuses=statuses,
            failures=self.failures,
        )
