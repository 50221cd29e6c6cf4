"""The workers of a job on several machines. Agents start and watch them; sockets lead to the driver."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any, cast

from torch import Tensor

from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.agent_calls import Agent, AgentCalls
from piper.workers.agent_versions import AgentVersions, version_lost
from piper.workers.driver import SocketWorkerGroup
from piper.workers.machines import WorkerLocation, not_started
from piper.workers.messages import CODEC, Assignment, StoreAddress
from piper.workers.processes import ProcessStatus, SharedFile, StopWatch
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Listener
from piper.workers.transport.shared_memory import TensorEntry, joined


class AgentWorkerGroup(SocketWorkerGroup):
    """Workers that agents have forked. The agents read their progress and state."""

    grace = TIMEOUTS.agent_reports

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        agents: Mapping[int, Agent],
        calls: AgentCalls,
        versions: AgentVersions | None = None,
    ) -> None:
        """Prepare a worker for each device. versions: the memory for copies. None: none are kept."""
        super().__init__(program, options)
        self.agents, self.calls = agents, calls
        self.versions, self.protects = versions, versions is not None
        self.locations: dict[int, WorkerLocation] = {}
        self.lost: dict[int, str] = {}
        self.unreachable: set[int] = set()  # devices whose agent is lost, or does not answer
        self.stops = StopWatch(TIMEOUTS.agent_sees_stopped)
        self.looks: dict[int, tuple[Any, float]] = {}  # calls of agents that are under way, and since when
        self.seen_at: dict[int, float] = {}
        self.status: dict[int, ProcessStatus] = {}
        self.moved: dict[int, ProcessStatus] = {}  # the statuses at the last call of `moving`

    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, startup: ExitStack
    ) -> None:
        addresses = {agent.address for agent in self.agents.values()}
        self.own = {d: LOOPBACK if len(addresses) == 1 else a.address for d, a in self.agents.items()}
        self.reached = LOOPBACK if addresses == {self.calls.own} else self.calls.own
        key, sent = self.calls.keys()
        self.store = store_on(self.reached)
        leads = {agent.node: agent for agent in self.agents.values()}
        memory = self.calls.put(joined(weights, index).numpy())
        values = {node: agent.actor.hold.remote(memory) for node, agent in leads.items()}
        with Listener(self.reached, key, self.options.timeout, CODEC) as listener:
            started = {
                device: agent.actor.start.remote(device, listener.address, sent, width, values[agent.node])
                for device, agent in self.agents.items()
            }
            until = monotonic() + TIMEOUTS.meeting
            while len(self.channels) < len(self.devices):
                self._accept(listener, started, until)
        for device, agent in self.agents.items():
            process = self.calls.get(started[device])
            self.processes[device] = process
            self.locations[device] = WorkerLocation(node=agent.node, address=agent.address, process=process)
            self.status[device] = ProcessStatus(process=process)
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

    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        files: Mapping[int, tuple[SharedFile, ...]] | None = None
        if self.versions is not None:
            files = self.versions.seen_by[device]
        return Assignment(
            device=device,
            local=self.agents[device].local,
            store=StoreAddress(host=self.reached, port=self.store.port, own=self.own[device]),
            options=self.options,
            setup=setup,
            shares=is_accelerator(self.program.device) and self.calls.crowded,
            values=index,
            path=tuple(sys.path) if self.agents[device].address == self.calls.own else (),
            versions=files,
        )

    @contextmanager
    def sharing(self, step: int) -> Iterator[None]:
        assert self.versions is not None
        try:
            self.versions.share(step)
        except self.calls.lost as error:
            raise version_lost(step) from error
        yield
        self.versions.shrink()

    def ended(self) -> dict[int, str]:
        self._look(TIMEOUTS.agent_poll_soon if self.silent or self.failures else TIMEOUTS.agent_poll)
        return self.lost

    def _look(self, age: float) -> None:
        """Note what agents have answered, and ask again where the last answer is older than `age` seconds."""
        now = monotonic()
        for device in self.locations.keys() - self.lost.keys() - self.looks.keys():
            if now - max(self.seen_at.get(device, 0.0), self.asked) >= age:
                self.looks[device] = (self.agents[device].actor.look.remote(), now)
        calls = {call: device for device, (call, _) in self.looks.items()}
        done, waiting = self.calls.wait([*calls], 0)
        for call in done:
            device, self.seen_at[calls[call]] = calls[call], now
            del self.looks[device]
            try:
                seen = cast(ProcessStatus, self.calls.get(call))
            except self.calls.lost:
                self._lose(device, "its agent is lost, and the process with it")
                continue
            self.status[device] = seen
            if seen.ended is not None:
                self.lost[device] = seen.ended
        for call in waiting:
            device = calls[call]
            if now - self.looks[device][1] > TIMEOUTS.agent_silent:
                silent = TIMEOUTS.agent_silent
                self._lose(device, f"no sign of life for {silent:g} s: its machine cannot be reached")

    def _lose(self, device: int, why: str) -> None:
        self.looks.pop(device, None)
        self.lost[device] = why
        self.unreachable.add(device)
        if self.versions is not None:
            self.versions.lost.add(device)

    def moving(self) -> bool:
        before, self.moved = self.moved, dict(self.status)
        return bool(before) and before != self.moved

    def stopped(self) -> set[int]:
        self._look(TIMEOUTS.agent_poll)
        return {d for d, seen in self.status.items() if self.stops.lasting(seen.process, seen.stopped)}

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what the agents see now: a worker may no longer answer."""
        self._look(0.0)
        if self.looks:
            self.calls.wait([call for call, _ in self.looks.values()], TIMEOUTS.accept)
        self._look(TIMEOUTS.agent_poll)
        return {device: replace(self.status[device], ended=self.lost.get(device)) for device in self.devices}

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
        # An agent that cannot be reached ends its worker once it can be, if it is not ended itself.
        ends = {device: agent.actor.end.remote() for device, agent in self.agents.items()}
        self.calls.answers(
            {device: call for device, call in ends.items() if device not in self.unreachable},
            TIMEOUTS.process_end,
        )
