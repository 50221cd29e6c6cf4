"""Versions of a job's state in the memory of several machines, which agents hold.

The driver has the same files as on one machine, see [Note: versions], but only the heads of sections are in
them, which it reads from the agents. So it finds the newest complete version as on one machine: the heads of
an agent that cannot be reached are missing. Sections go from agent to agent when workers need them.
"""

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from piper.errors import LaunchError
from piper.ir.format import size
from piper.plan.plan import Plans
from piper.plan.protected import GENERATIONS
from piper.workers.agent import Agent, AgentCalls
from piper.workers.processes import Place, SharedFile, write_at
from piper.workers.transport.version_sections import HEAD, SPAN, HeldVersion, step_in
from piper.workers.transport.versions import Files, Versions, version_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortMachine:
    """A machine that has too little shared memory for the versions of its devices."""

    address: str
    needs: int  # bytes
    has: int

    @property
    def why(self) -> str:
        """Return why it cannot be used, in words."""
        return (
            f"it has {size(self.has)} of shared memory, and versions of its devices need {size(self.needs)}"
        )


class AgentVersions(Versions):
    """The driver's side of versions that agents hold."""

    def __init__(self, plans: Plans, calls: AgentCalls) -> None:
        """Prepare for agents. A machine that has too little memory is found by `short`."""
        super().__init__(plans, checked=False)
        self.calls = calls
        self.needs = version_bytes(self.holders)
        self.owner = secrets.token_hex(8)
        self.agents: dict[int, Agent] = {}  # by device
        self.lost: set[int] = set()  # devices whose agent does not answer any more
        self.seen_by: dict[int, dict[int, tuple[SharedFile, ...]]] = {}  # files as workers see them

    def of(self, plans: Plans) -> "AgentVersions":
        """Return memory for another program, with the same agents' machines."""
        return AgentVersions(plans, self.calls)

    def short(self, agents: Mapping[int, Agent], others: Iterable[Agent] = ()) -> dict[str, ShortMachine]:
        """Return the machines with too little memory for their devices, by node; `others`: have no device."""
        machines: dict[str, ShortMachine] = {}
        coming = {d: agent for d, agent in agents.items() if self.agents.get(d) != agent}
        known = [*agents.values(), *others]
        for node in {agent.node: None for agent in coming.values()}:
            here = [agent for agent in known if agent.node == node]
            free = cast("int | None", self.calls.answers({0: here[0].actor.room.remote()}).get(0))
            needs = sum(self.needs[device] for device, agent in coming.items() if agent.node == node)
            if free is None or needs <= free:  # one that does not answer is found when its worker starts
                continue
            old = self.calls.answers({n: agent.actor.held.remote(self.owner) for n, agent in enumerate(here)})
            has = free + sum(cast("dict[int, int]", old).values())
            if needs > has:
                machines[node] = ShortMachine(address=here[0].address, needs=needs, has=has)
        return machines

    def place(self, agents: Mapping[int, Agent]) -> None:
        """Let agents hold the memory of their devices from now on. `short` has found none.

        An agent that is lost meanwhile raises an error, and devices have the agents that they had before:
        these may still hold versions that are to be moved.
        """
        new = {d: agent for d, agent in agents.items() if self.agents.get(d) != agent}
        before = [d for d in new if d in self.agents and d not in self.lost]
        if before:
            self._look()
        here: dict[str, list[int]] = {}  # by node
        for device, agent in agents.items():
            here.setdefault(agent.node, []).append(device)
        calls = {}
        for device, agent in agents.items():
            near, kept = here[agent.node], [device]
            if device == near[0]:  # it also holds what comes from other machines
                kept += [d for d in self.devices if d not in near]
            if device in new and agent not in [self.agents[d] for d in before]:
                agent.actor.keep.remote("", (), 0)  # of a time that this job no longer knows
            calls[device] = agent.actor.keep.remote(self.owner, kept, GENERATIONS)
        files = {d: cast("dict[int, tuple[SharedFile, ...]]", self.calls.get(c)) for d, c in calls.items()}
        self._move(before, agents)
        self.agents, self.lost = dict(agents), set()
        for near in here.values():
            seen = files[near[0]] | {device: files[device][device] for device in near}
            self.seen_by |= dict.fromkeys(near, seen)

    def _move(self, before: Iterable[int], agents: Mapping[int, Agent]) -> None:
        """Bring the versions of devices from the agents that they had before, where these still answer."""
        moved = [
            agents[device].actor.take.remote(place, self._image(place), HEAD.size)
            for device in before
            for place in self.places(device)
            if step_in(self.descriptors[device][place[1]], place[2] // SPAN) is not None
        ]
        for call in moved:
            self.calls.get(call)

    def files_of(self, device: int) -> Files:
        return self.seen_by[device]

    def _look(self) -> None:
        """Read the heads of all sections that agents hold."""
        calls = {
            d: agent.actor.heads.remote(self.places(d), HEAD.size)
            for d, agent in self.agents.items()
            if d not in self.lost
        }
        seen = self.calls.answers(calls)
        for device in self.devices:
            places = self.places(device)
            heads = cast("list[bytes]", seen.get(device, [b""] * len(places)))
            for (_, generation, at), head in zip(places, heads, strict=True):
                os.pwrite(self.descriptors[device][generation], head.ljust(HEAD.size, b"\0"), at)

    def newest(self, last: int | None = None) -> int | None:
        """Return the newest step, up to `last`, of which all elements can be reached. None: there is none."""
        self._look()
        return super().newest(last)

    def forget(self, chosen: Callable[[int], bool]) -> list[Place]:
        self._look()
        old = super().forget(chosen)
        places = {d: [place for place in old if place[0] == d] for d in self.agents.keys() - self.lost}
        calls = {d: self.agents[d].actor.erase.remote(at, HEAD.size) for d, at in places.items() if at}
        self.calls.answers(calls)
        return old

    def share(self, step: int) -> None:
        """Bring the sections of a version to all machines, before workers read them."""
        self._look()
        chosen, leads = self._chosen(step), self._leads()
        images = {place: self._image(place) for place in chosen} if len(leads) > 1 else {}
        moved = [
            agent.actor.take.remote(place, images[place], HEAD.size)
            for agent in leads
            for place in chosen
            if self.agents[place[0]].node != agent.node
        ]
        for call in moved:
            self.calls.get(call)

    def shrink(self) -> None:
        """Give back the memory of what was brought to other machines, once workers have read it."""
        for agent in self._leads():
            agent.actor.shrink.remote([d for d in self.devices if self.agents[d].node != agent.node])

    def _leads(self) -> Collection[Agent]:
        """Return the first agent of each machine, which holds what comes from others."""
        return {agent.node: agent for agent in reversed(self.agents.values())}.values()

    def _chosen(self, step: int) -> list[Place]:
        """Return where the sections of a complete version begin."""
        sections = self.holders.all_of(self.descriptors, step)
        if sections is None:
            raise version_lost(step)
        return [(d, self.descriptors[d].index(file), number * SPAN) for d, file, number in sections]

    def _image(self, place: Place) -> Any:  # noqa: ANN401  a call has no type in common
        """Return the call that reads a section from the agent that holds it."""
        device, generation, at = place
        nbytes = HEAD.unpack(os.pread(self.descriptors[device][generation], HEAD.size, at))[-1]
        return self.agents[device].actor.image.remote(place, nbytes)

    def _held(self, step: int) -> list[tuple[int, HeldVersion]]:
        """Return the sections of a complete version, brought to this machine."""
        for place in self._chosen(step):
            device, generation, at = place
            try:
                image = cast(bytes, self.calls.get(self._image(place)))
            except self.calls.lost as error:
                raise version_lost(step) from error
            write_at(self.descriptors[device][generation], at, image)
        return super()._held(step)


def version_lost(step: int) -> LaunchError:
    """Return the error of a version whose agent was lost after the version was chosen."""
    return LaunchError(
        f"the state after step {step} is lost with a machine that held it",
        by="recovery",
        hint="keep copies: protect(at(), copies=1); --resume goes on from the newest checkpoint",
    )
