"""The workers of a job on several machines. Agents start and watch them; sockets lead to the driver."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any, cast

from torch import Tensor

from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.agent_calls import Agent, AgentCalls, not_started
from piper.workers.agent_versions import AgentVersions, version_lost
from piper.workers.driver import SocketWorkerGroup
from piper.workers.messages import CODEC
from piper.workers.processes import ProcessStatus, StopWatch
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Listener
from piper.workers.transport.shared_memory import TensorEntry, joined


class AgentWorkerGroup(SocketWorkerGroup):
    """Workers that agents have forked. The agents read their progress and state."""

    grace = TIMEOUTS.agent_reports
    versions: AgentVersions | None

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        agents: Mapping[int, Agent],
        calls: AgentCalls,
        versions: AgentVersions | None = None,
        packed: bytes | None = None,
    ) -> None:
        super().__init__(program, options, agents, versions, packed)
        self.calls, self.home = calls, calls.own
        self.shares = is_accelerator(program.device) and calls.crowded
        self.unreachable: set[int] = set()  # devices whose agent is lost, or does not answer
        self.stops = StopWatch(TIMEOUTS.agent_sees_stopped)
        self.looks: dict[int, tuple[Any, float]] = {}  # calls of agents that are under way, and since when
        self.seen_at: dict[int, float] = {}

    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, startup: ExitStack
    ) -> None:
        key, sent = self.calls.keys()
        leads = {agent.node: agent for agent in self.agents.values()}
        memory = self.calls.put(joined(weights, index).numpy())
        values = {node: agent.actor.hold.remote(memory) for node, agent in leads.items()}
        with Listener(self.host, key, self.options.timeout, CODEC) as listener:
            started = {
                device: agent.actor.start.remote(device, listener.address, sent, width, values[agent.node])
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
