"""`local`: every device is a process of this machine."""

import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic

from piper.errors import WorkerError
from piper.launch.base import streams_of
from piper.launch.blame import Scene, Sighting, blame
from piper.launch.channel import Channel, ClosedError
from piper.launch.crew import Crew, CrewRun, devices_of, unread_values
from piper.launch.freight import pack_setup
from piper.launch.look import running, stopped
from piper.launch.member import PATIENCE, Call, Meeting, Order, Places
from piper.launch.nursery import Nursery
from piper.launch.nursery import nursery as started_nursery
from piper.launch.shared import Marks, layout, nameless_file, share
from piper.launch.store import LOOPBACK, store_on
from piper.launch.watch import Failure
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.worker import Options

POLL = 0.2  # seconds between looks at whether anything moves
GRACE = 0.5  # seconds that the cause of a failure may come after its first victim
END = 10.0  # seconds that a killed process may take to end


class LocalCrew(Crew):
    """Workers that a nursery forks, each at the end of a socket."""

    def __init__(self, program: ProgramLike, options: Options, nursery: Nursery) -> None:
        self.program, self.options, self.nursery = program, options, nursery
        self.devices = devices_of(program.plans)
        self.channels: dict[int, Channel] = {}
        self.pids: dict[int, int] = {}
        self.failures: list[Failure] = []

    def start(self) -> CrewRun:
        """Start every worker and wait until all have met."""
        program, devices = self.program, self.devices
        width = streams_of(program.plans)
        values = initial_tensors(program.job)
        index = layout(values)
        store = store_on(LOOPBACK)
        meeting = Meeting(host=LOOPBACK, port=store.port, address=LOOPBACK)
        setup = pack_setup(setup_of(program))
        places = Places(values=index, devices=tuple(devices), width=width, path=tuple(sys.path))
        with ExitStack() as held:
            marks = nameless_file(Marks.size(len(devices), width))
            held.callback(os.close, marks)
            memory = share(values, index)
            held.callback(os.close, memory)
            self.marks = Marks(marks, devices, width)
            for device in devices:
                here, there = socket.socketpair()
                with there:
                    self.pids[device] = self.nursery.fork([there.fileno(), marks, memory])
                self.channels[device] = Channel(here, self.options.timeout)
            for local, device in enumerate(devices):
                order = Order(device=device, local=local, meeting=meeting, options=self.options, setup=setup)
                self._send(device, (places, order))
        self._gather(set(devices), max(PATIENCE, self.options.timeout))
        return CrewRun(program, self, unread_values(program, values))

    def ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        for device, argument in arguments.items():
            self._send(device, (call, argument))
        return self._gather(set(arguments), self.options.timeout)

    def _send(self, device: int, value: object) -> None:
        try:
            self.channels[device].send(value)
        except (ClosedError, TimeoutError):  # it is dead or stopped, and the scene will show it
            raise self._blame() from None

    def _gather(self, waiting: set[int], timeout: float) -> dict[int, object]:
        """The answers of these devices, as long as any of them moves."""
        answers: dict[int, object] = {}
        seen, moved = b"", monotonic()
        while waiting:
            channels = {self.channels[device]: device for device in waiting}
            ready = self._ready([*channels])
            for channel in ready:
                device = channels[channel]
                answers[device] = self._answer(device)
                waiting.discard(device)
            if self.failures or self._dead():
                raise self._blame()
            now = bytes(self.marks.cells)
            if ready or now != seen:
                seen, moved = now, monotonic()
            elif monotonic() - moved > timeout + POLL:
                raise self._blame()
        return answers

    def _ready(self, channels: Sequence[Channel]) -> list[Channel]:
        """The channels that have something to say, after a wait that ends early when a worker does."""
        watched: list[Channel | Nursery] = [*channels, self.nursery]
        return [end for end in select.select(watched, [], [], POLL)[0] if isinstance(end, Channel)]

    def _answer(self, device: int) -> object:
        try:
            answer = self.channels[device].recv()
        except (ClosedError, TimeoutError):
            raise self._blame() from None
        if isinstance(answer, Failure):
            self.failures.append(answer)
        return answer

    def _dead(self) -> dict[int, int]:
        """The workers that have ended, and how."""
        ended = self.nursery.ended()
        return {device: ended[pid] for device, pid in self.pids.items() if pid in ended}

    def _blame(self) -> WorkerError:
        """The error that names the cause, after a moment in which it may come to light."""
        until = monotonic() + GRACE
        while monotonic() < until and not self._dead():
            if any(failure.kind == "error" for failure in self.failures):
                break
            left = [self.channels[d] for d in self.devices if d not in {f.device for f in self.failures}]
            for channel in self._ready(left):
                self._overhear(channel)
        dead = self._dead()
        sightings = {
            device: Sighting(
                process=pid,
                running=running(self.marks.of(device)),
                ended=f"the process {how(dead[device])}" if device in dead else None,
                stopped=device not in dead and stopped(pid),
            )
            for device, pid in self.pids.items()
        }
        scene = Scene(
            plans=self.program.plans,
            origins=self.program.origins,
            timeout=self.options.timeout,
            sightings=sightings,
            failures=self.failures,
        )
        return blame(scene)

    def _overhear(self, channel: Channel) -> None:
        """Take what a worker says while the cause of a failure is looked for."""
        try:
            answer = channel.recv()
        except (ClosedError, TimeoutError):
            return
        if isinstance(answer, Failure):
            self.failures.append(answer)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        ended = self.nursery.ended()
        left = [pid for pid in self.pids.values() if pid not in ended]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.nursery.wait(left, END)
        self.channels.clear()
        self.pids.clear()


def how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"


@contextmanager
def launch_local(
    program: ProgramLike, options: Options | None = None, nursery: Nursery | None = None
) -> Iterator[CrewRun]:
    """Start a program on processes of this machine, and end them with the block.

    `nursery`: forks the workers, where several launches share one; else the launch has its own.
    """
    with ExitStack() as held:
        forks = nursery or held.enter_context(started_nursery())
        crew = LocalCrew(program, options or Options(), forks)
        held.callback(crew.close)
        yield crew.start()
