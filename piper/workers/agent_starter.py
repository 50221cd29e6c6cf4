"""Starts the workers of a program on several machines, through agents that outlive workers."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, cast

from piper.plan.plan import Plans
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.agent import Agent, AgentCalls, machines_of, not_started
from piper.workers.agent_versions import AgentVersions, ShortMachine
from piper.workers.driver import AgentWorkerGroup
from piper.workers.group import Starter, WorkerGroup
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.versions import Versions, too_little


@dataclass(slots=True, eq=False)
class Bundle:
    """The agents of a machine, one for each of its devices."""

    agents: tuple[Agent, ...]
    warm: list[Any]  # calls that end when they are warm
    since: (
        float | None
    )  # when they were taken. None: they have a device, or were reported once they were warm
    short: ShortMachine | None = None  # of memory, if it is


class AgentStarter(Starter):
    """Starts the workers of a program again and again, through agents on the machines that are left.

    Agents of spares import torch too, and so do those of machines that join later: `notice` looks for them.
    """

    versions: AgentVersions | None

    def __init__(self, program: ProgramLike, calls: AgentCalls, protects: bool) -> None:
        super().__init__(program, AgentVersions(program.plans, calls) if protects else None)
        self.calls, self.cleanup = calls, ExitStack()
        if self.versions is not None:
            self.cleanup.callback(self.versions.close)
        self.machines, self.apart = machines_of(program.plans)
        self.width = max(map(len, self.machines))
        self.group: AgentWorkerGroup | None = None
        self.bundles: dict[int, Bundle] = {}
        self.used: dict[int, int] = {}  # the bundle of each machine
        self.looks_at = 0.0  # when `notice` looks again

    @abstractmethod
    def _hire(self) -> None:
        """Take agents into bundles that have none."""

    def _take(self, bundle: int, agents: tuple[Agent, ...]) -> None:
        """Take new agents into a bundle, as a spare: they hold nothing that the ones before them held."""
        warm = [agent.actor.warm.remote() for agent in agents]
        self.bundles[bundle] = Bundle(agents=agents, warm=warm, since=monotonic())
        self.used = {machine: used for machine, used in self.used.items() if used != bundle}

    def notice(self) -> None:
        """Take agents of machines that have joined, and note which spares have become warm."""
        if monotonic() >= self.looks_at:
            starting = self._notice()
            self.looks_at = monotonic() + (TIMEOUTS.warm_poll if starting else TIMEOUTS.agent_poll)

    def _notice(self) -> bool:
        """Do so now. Return whether agents still start."""
        try:
            self._hire()
        except self.calls.lost:
            return True  # the cluster does not answer now; a start that needs agents asks it again
        for bundle in self.bundles.values():
            if bundle.since is not None and self.calls.finished(bundle.warm):
                took, bundle.since = monotonic() - bundle.since, None
                answered = self.calls.answers(dict(enumerate(bundle.warm)))
                if len(answered) == len(bundle.warm):  # else agents are lost
                    self.warmed.append((bundle.agents[0].address, took))
        return any(bundle.since is not None for bundle in self.bundles.values())

    @abstractmethod
    def _lacking(self) -> Exception:
        """Return the error of too few machines."""

    @property
    def near(self) -> bool:
        """Return whether all workers are on the driver's machine wherever they start, and see its memory."""
        with suppress(*self.calls.lost):  # the cluster does not answer now: those that are known count
            self._hire()
        return {agent.address for agent in self._without(())} <= {self.calls.own}

    def start(self, options: Options) -> AgentWorkerGroup:
        """Start a worker for each device."""
        try:
            agents = self._agents()
            self._place(agents)
            self.group = group = AgentWorkerGroup(self, options, agents, self.calls)
            group.begin()
        except self.calls.lost as error:
            raise not_started((str(error) or type(error).__name__).splitlines()[0]) from error
        return group

    def _place(self, agents: Mapping[int, Agent]) -> None:
        """Let these agents hold the memory of versions, and the others none."""
        if self.versions is not None:
            self.versions.place(agents)
            for agent in self._without(agents.values()):
                agent.actor.keep.remote(self.versions.owner, (), 0)

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on, on any bundles that live."""
        super().use(program, versions, places)
        self._arrange(program.plans)

    def _arrange(self, plans: Plans) -> None:
        """Divide the devices of another program among machines."""
        self.machines, self.apart = machines_of(plans)
        self.width = max(map(len, self.machines))

    def _agents(self) -> dict[int, Agent]:
        """Return an agent for each device, once they are warm. Those that still answer are used again."""
        began, self.waited = monotonic(), 0.0
        while True:
            self._hire()
            ranks = self._ranks(len(self.machines))
            chosen, late = self._chosen(ranks), monotonic() > began + TIMEOUTS.machines_come
            starting = [call for bundle in chosen if ranks[bundle] for call in self.bundles[bundle].warm]
            enough = len(chosen) == len(self.machines)
            if enough and (late or not starting):
                if self._pass_over(chosen):
                    continue
                self.used = self._placed(chosen)
                for bundle in chosen:
                    self.bundles[bundle].since = None
                return self._by_device(self.used)
            short = [bundle.short for bundle in self.bundles.values() if bundle.short is not None]
            if short and not enough and (late or self.group is None):
                best = max(short, key=lambda machine: machine.has)
                asked = self.program.plans.protection
                raise too_little(best.needs, best.has, asked, f" of {best.address}")
            if late:
                raise self._lacking()
            waits = monotonic()
            if enough:
                self.calls.wait(starting, max(0.0, began + TIMEOUTS.machines_come - waits))
            else:
                sleep(TIMEOUTS.agent_poll)
            self.waited += monotonic() - waits

    def _chosen(self, ranks: Mapping[int, int]) -> list[int]:
        """Return the bundles to use of those that live: first those in use, then warm ones."""
        usable = sorted(ranks, key=lambda b: (b not in self.used.values(), ranks[b], b))
        return usable[: len(self.machines)]

    def _placed(self, chosen: Sequence[int]) -> dict[int, int]:
        """Return the bundle of each machine. A machine stays in its bundle if that is chosen."""
        kept = {m: b for m, b in self.used.items() if b in chosen and m < len(self.machines)}
        free = iter(bundle for bundle in chosen if bundle not in kept.values())
        return {m: kept[m] if m in kept else next(free) for m in range(len(self.machines))}

    def _by_device(self, placed: Mapping[int, int]) -> dict[int, Agent]:
        return {
            device: agent
            for machine, bundle in placed.items()
            for device, agent in zip(self.machines[machine], self.bundles[bundle].agents, strict=False)
        }

    def _pass_over(self, chosen: Sequence[int]) -> bool:
        """Return whether chosen bundles are on machines that are short of memory, and note these."""
        if self.versions is None:
            return False
        placed = self._placed(chosen)
        agents = self._by_device(placed)
        short = self.versions.short(agents, self._without(agents.values()))
        for node, machine in short.items():
            there = [b for b in placed.values() if self.bundles[b].agents[0].node == node]
            new = [b for b in there if b not in self.used.values()] or there
            self.bundles[new[-1]].short = machine  # one at a time: the others may fit without it
            self.passed_over.append(machine)
        return bool(short)

    def _without(self, used: Iterable[Agent]) -> list[Agent]:
        """Return the agents that have no device."""
        busy = [*used]
        return [agent for bundle in self.bundles.values() for agent in bundle.agents if agent not in busy]

    def room(self, *, warm: bool = False) -> int | None:
        """Return for how many devices workers can start now. warm: only on agents with torch imported."""
        until = monotonic() + (0.0 if warm else TIMEOUTS.agents_settle)
        while True:
            with suppress(*self.calls.lost):
                self._hire()
            ranks = self._ranks(len(self.bundles))
            chosen = self._chosen(ranks)
            if not warm and len(chosen) == len(self.machines) and self._pass_over(chosen):
                continue
            count = sum(not (warm and starting) for starting in ranks.values())
            if count >= len(self.machines) or monotonic() > until:
                return self.width * count
            sleep(TIMEOUTS.agent_poll_soon)

    def _ranks(self, wanted: int) -> dict[int, int]:
        """Return the bundles that live and have memory: 0 if their agents are warm, 1 if they still start."""
        finished = self.calls.finished
        ranks = {name: 1 for name, bundle in self.bundles.items() if not finished(bundle.warm)}
        asked = {
            name: [agent.actor.look.remote() for agent in bundle.agents]
            for name, bundle in self.bundles.items()
            if name not in ranks
        }
        # It takes long to see that a machine is lost: `wanted` answers are enough.
        until = monotonic() + TIMEOUTS.agent_answers
        while sum(map(finished, asked.values())) < min(wanted, len(asked)) and monotonic() < until:
            finished([call for calls in asked.values() for call in calls], TIMEOUTS.agent_poll_soon)
        for name, calls in asked.items():
            try:
                if finished(calls):
                    for call in calls:
                        self.calls.get(call, TIMEOUTS.agent_answers)
                    ranks[name] = 0
            except self.calls.lost:
                del self.bundles[name]  # others take their place, if the machine lives
        there = {name: self.bundles[name] for name in ranks}
        again = {n: bundle.agents[0].actor.room.remote() for n, bundle in there.items() if bundle.short}
        for name, free in self.calls.answers(again).items():  # machines that had too little memory
            short = there[name].short
            if free is None or (short is not None and cast(int, free) >= short.needs):
                there[name].short = None
        return {name: rank for name, rank in ranks.items() if there[name].short is None}

    def expect(self, group: WorkerGroup, stall: float) -> None:
        """Let workers fail after `stall` seconds without progress, or later: all machines can answer."""
        super().expect(group, max(stall, TIMEOUTS.agent_stall))

    def close(self) -> None:
        """End the agents. Idempotent."""
        self.cleanup.close()
