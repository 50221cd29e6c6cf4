"""The driver of workers that are processes: starts them, asks them, and notices when one is lost."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from time import monotonic, sleep
from typing import Any, cast

from torch import Tensor

from piper.errors import WorkerError
from piper.runtime.accelerator import is_accelerator
from piper.runtime.recorders import ClockOffset, compare
from piper.runtime.setup import Setup, initial_tensors, setup_of
from piper.runtime.worker import Options
from piper.workers.agent import Agent, AgentCalls, not_started
from piper.workers.agent_versions import AgentVersions, version_lost
from piper.workers.blame import Failure, JobSnapshot, blame
from piper.workers.group import A, R, Starter, WorkerGroup, unread_values
from piper.workers.messages import CODEC, Assignment, Leaving, pack_setup
from piper.workers.processes import ClosedError, ProcessStatus, StopWatch
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.serve import WorkerAnswers, WorkerServer
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel, Listener
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import Codec
from piper.workers.transport.versions import Versions

LOOKS = 3  # snapshots that must agree


class SocketWorkerGroup(WorkerGroup):
    """Workers that answer over channels. A launcher adds how they are started and watched."""

    grace = TIMEOUTS.cause_follows
    home = LOOPBACK  # the address of the driver's machine
    shares = False  # workers have to share accelerators
    exit_notifiers: Sequence[ForkServer] = ()  # become readable when a process ends

    def __init__(self, starter: Starter, options: Options, agents: Mapping[int, Agent]) -> None:
        """Prepare a worker of the starter's program for each device."""
        super().__init__(starter.program, options)
        self.starter, self.agents = starter, agents
        self.versions: Versions | None = starter.versions
        self.channels: dict[int, Channel] = {}
        self.processes: dict[int, int] = {}  # process ids by device
        self.status: dict[int, ProcessStatus] = {}  # what was last seen of each process
        self.moved: dict[int, ProcessStatus] = {}  # the same, at the last call of `moving`
        self.silent: set[int] = set()  # devices whose channel is closed or stuck
        self.asked = monotonic()
        self.stops = StopWatch()

    @abstractmethod
    def connect(self, weights: Mapping[str, Tensor], startup: ExitStack) -> None:
        """Start a worker for every device and open its channel; `startup`: closes once all are ready."""

    def start(self) -> dict[str, Tensor]:
        """Start all workers, send each its assignment, and wait until all have met."""
        program = self.program
        needed = setup_of(program)
        weights = needed.build_code(
            program.plans, lambda: {} if self.options.blank else initial_tensors(program)
        )
        self.starter.packed = setup = self.starter.packed or pack_setup(needed)
        addresses = {agent.address for agent in self.agents.values()}
        self.host = LOOPBACK if addresses == {self.home} else self.home
        self.store = store_on(self.host)
        with ExitStack() as startup:
            self.connect(weights, startup)
            for device, agent in self.agents.items():
                given = Assignment(
                    device=device,
                    local=agent.local,
                    host=self.host,
                    port=self.store.port,
                    own=LOOPBACK if len(addresses) == 1 else agent.address,
                    options=self.options,
                    setup=setup,
                    shares=self.shares,
                    path=tuple(sys.path) if agent.address == self.home else (),
                    versions=None if self.versions is None else self.versions.files_of(device),
                )
                self.send(device, given)
            self.gather(set(self.devices), max(TIMEOUTS.meeting, self.options.timeout))
        return unread_values(program, weights)

    @abstractmethod
    def look(self, age: float) -> None:
        """Look at every process that was last seen `age` seconds ago, or before."""

    def ended(self) -> dict[int, str]:
        """Return the devices whose process has ended, and how it ended."""
        self.look(TIMEOUTS.agent_poll_soon if self.silent or self.failures else TIMEOUTS.agent_poll)
        return {device: seen.ended for device, seen in self.status.items() if seen.ended is not None}

    def stopped(self) -> set[int]:
        """Return the devices whose process has been stopped by a signal for several seconds."""
        self.look(TIMEOUTS.agent_poll)
        return {d for d, seen in self.status.items() if self.stops.lasting(seen.process, seen.stopped)}

    def moving(self) -> bool:
        """Return whether any device has moved on in its plan since the last call."""
        self.look(TIMEOUTS.agent_poll)
        before, self.moved = self.moved, dict(self.status)
        return bool(before) and before != self.moved

    def ask(self, call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
        return cast("dict[int, R]", self._ask(call.__name__, arguments, self.stall))

    def clock(self, device: int) -> ClockOffset:
        return compare(lambda: self.ask(WorkerAnswers.clock, {device: None})[device])

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
        with self._inboxes(waiting) as inboxes:
            while len(answers) < len(waiting):
                ready, before = ready_devices(inboxes, TIMEOUTS.driver_poll), len(answers)
                for device in ready:
                    answer = self._hear(device)
                    if not isinstance(answer, Leaving):
                        answers[device] = answer
                        inboxes.unregister(self.channels[device])
                if self.failures or self.silent or (not ready and (self.ended() or self.stopped())):
                    raise self.blamed()
                if len(answers) > before or self.moving():
                    moved = monotonic()
                elif monotonic() - moved > timeout + TIMEOUTS.driver_poll:
                    raise self.blamed()
        return answers

    def _inboxes(self, devices: Iterable[int]) -> BaseSelector:
        """Return what selects the devices whose message has come. A wait ends early when a process ends."""
        inboxes = DefaultSelector()
        for device in devices:
            inboxes.register(self.channels[device], EVENT_READ, device)
        for notifier in self.exit_notifiers:
            inboxes.register(notifier, EVENT_READ)
        return inboxes

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
        with self._inboxes(set(self.devices) - done) as inboxes:
            for device in ready_devices(inboxes, timeout):
                self._hear(device)

    def settled(self) -> JobSnapshot:
        """Return a snapshot in which the remaining workers have reached what they need of the failed one.

        Before that, which worker waits for which depends on the moment of the snapshot.
        """
        snapshot, alike, until = self._snapshot(), 1, monotonic() + TIMEOUTS.victims_settle
        while alike < LOOKS and snapshot.broken and monotonic() < until:
            sleep(TIMEOUTS.snapshot_pause)
            before, snapshot = snapshot, self._snapshot()
            alike = alike + 1 if snapshot.statuses == before.statuses and not snapshot.at_work else 1
        return snapshot

    def _snapshot(self) -> JobSnapshot:
        """Return the state of the job now. What an ended process has sent is read after its end is seen."""
        self.look(0.0)
        self._listen(0)
        return self.snapshot(dict(self.status), self.stall)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()


def ready_devices(inboxes: BaseSelector, timeout: float) -> list[int]:
    """Return the devices whose message comes within so many seconds."""
    return [key.data for key, _ in inboxes.select(timeout) if key.data is not None]


class AgentWorkerGroup(SocketWorkerGroup):
    """Workers that agents have forked. The agents read their progress and state."""

    grace = TIMEOUTS.agent_reports
    versions: AgentVersions | None

    def __init__(
        self, starter: Starter, options: Options, agents: Mapping[int, Agent], calls: AgentCalls
    ) -> None:
        super().__init__(starter, options, agents)
        self.calls, self.home = calls, calls.own
        self.shares = is_accelerator(self.program.device) and calls.crowded
        self.unreachable: set[int] = set()  # devices whose agent is lost, or does not answer
        self.stops = StopWatch(TIMEOUTS.agent_sees_stopped)
        self.looks: dict[int, tuple[Any, float]] = {}  # calls of agents that are under way, and since when
        self.seen_at: dict[int, float] = {}

    def connect(self, weights: Mapping[str, Tensor], startup: ExitStack) -> None:
        key, sent = self.calls.keys()
        leads = {agent.node: agent for agent in self.agents.values()}
        given = self.calls.put(Codec().encode(weights))
        values = {node: agent.actor.hold.remote(given) for node, agent in leads.items()}
        with closing(Listener(self.host, key, self.options.timeout, CODEC)) as listener:
            started = {
                device: agent.actor.start.remote(device, listener.address, sent, values[agent.node])
                for device, agent in self.agents.items()
            }
            until = monotonic() + TIMEOUTS.meeting
            while len(self.channels) < len(self.devices):
                self._accept(listener, started, until)
        for device, call in started.items():
            self.processes[device] = self.calls.get(call)
            self.status[device] = ProcessStatus(process=self.processes[device])
        for agent in leads.values():
            startup.callback(agent.actor.release.remote)

    def _accept(self, listener: Listener, started: Mapping[int, Any], until: float) -> None:
        arrived = listener.accept(TIMEOUTS.accept)
        if arrived is not None:
            device, self.channels[device] = arrived
            return
        done, _ = self.calls.wait([*started.values()], 0)
        for call in done:
            self.calls.get(call)  # it raises what an agent has raised
        for device, call in started.items():
            if call in done and device not in self.channels:
                seen = self.calls.answers({device: self.agents[device].actor.look.remote()}).get(device)
                if isinstance(seen, ProcessStatus) and seen.ended is not None:
                    raise not_started(seen.ended)
        if monotonic() > until:
            raise not_started("it cannot reach the driver")

    @contextmanager
    def sharing(self, step: int) -> Iterator[None]:
        assert self.versions is not None
        try:
            self.versions.share(step)
        except self.calls.lost as error:
            raise version_lost(step) from error
        yield
        self.versions.shrink()

    def look(self, age: float) -> None:
        """Note what agents have answered, and ask again where the last answer is older than `age` seconds.

        Wait for the answers where they are to be new: a worker may no longer answer itself.
        """
        now = monotonic()
        alive = {device for device, seen in self.status.items() if seen.ended is None}
        for device in alive - self.looks.keys():
            if now - max(self.seen_at.get(device, 0.0), self.asked) >= age:
                self.looks[device] = (self.agents[device].actor.look.remote(), now)
        calls = {call: device for device, (call, _) in self.looks.items()}
        done, waiting = self.calls.wait([*calls], 0 if age else TIMEOUTS.accept)
        for call in done:
            device, self.seen_at[calls[call]] = calls[call], now
            del self.looks[device]
            try:
                self.status[device] = cast(ProcessStatus, self.calls.get(call))
            except self.calls.lost:
                self._lose(device, "its agent is lost, and the process with it")
        for call in waiting:
            device = calls[call]
            if now - self.looks[device][1] > TIMEOUTS.agent_silent:
                silent = TIMEOUTS.agent_silent
                self._lose(device, f"no sign of life for {silent:g} s: its machine cannot be reached")

    def _lose(self, device: int, why: str) -> None:
        self.looks.pop(device, None)
        self.status[device] = replace(self.status[device], ended=why)
        self.unreachable.add(device)
        if self.versions is not None:
            self.versions.lost.add(device)

    def close(self) -> None:
        super().close()
        # An agent that cannot be reached ends its worker once it can be, if it is not ended itself.
        ends = {device: agent.actor.end.remote() for device, agent in self.agents.items()}
        self.calls.answers(
            {device: call for device, call in ends.items() if device not in self.unreachable},
            TIMEOUTS.process_end,
        )
