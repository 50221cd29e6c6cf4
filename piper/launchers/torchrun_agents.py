"""Agents in the ranks of a torchrun job, of which there are more than devices: `piper train --spares`.

Every rank has an agent, which forks the worker of a device, or waits as a spare. Rank 0 also drives. torchrun
sees the ranks only, so a worker that is lost does not end them. When a machine is lost its ranks are gone,
and agents of other machines take their place. A rank whose link was down connects again, as a spare.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any, cast

import numpy as np

from piper.errors import LaunchError
from piper.launchers.agent_calls import Agent, AgentCalls
from piper.launchers.agent_starter import AgentStarter
from piper.launchers.agent_versions import AgentVersions
from piper.launchers.machine_agent import MachineAgent
from piper.launchers.machines import machines_of, no_room
from piper.launchers.messages import PATIENCE
from piper.launchers.processes import ProcessStatus, SharedFile
from piper.launchers.rank_environment import RankEnvironment, check_size
from piper.launchers.rendezvous import (
    DriverAddress,
    check_key,
    given_key,
    key_of,
    lost_leader,
    new_launch,
    next_launch,
    offered_key,
    own_address,
    publish_address,
    ranks_absent,
)
from piper.launchers.transport.channel import Channel, ClosedError, Listener, connect
from piper.launchers.transport.serialize import Codec
from piper.launchers.worker_server import crowded
from piper.plan.plan import Plans
from piper.runtime.setup import ProgramLike

log = logging.getLogger("piper")
AWAY = 120.0  # seconds for which a rank tries to reach the driver again
AGAIN = 1.0  # seconds between two tries
PLACE = 5.0  # seconds in which an agent that has connected says where it runs
METHODS = frozenset(name for name in vars(MachineAgent) if not name.startswith("_"))  # that a driver may call


class AgentLostError(ConnectionError):
    """An agent cannot be reached any more, or could not do what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The first message of an agent: where it runs."""

    address: str
    local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailure:
    """An answer of an agent that could not do what it was asked for."""

    why: str


CODEC = Codec((AgentPlace, AgentFailure, ProcessStatus, SharedFile))


def sent(value: object) -> object:
    """Return a value as a message holds it. Arrays are bytes there."""
    return value.tobytes() if isinstance(value, np.ndarray) else value


def received(value: object) -> object:
    """Return a value of a message."""
    return np.frombuffer(value, dtype=np.uint8) if isinstance(value, bytes) else value


class RankAgent(MachineAgent):
    """The agent of a rank. Its workers prove that they know the key of the job, which is never sent."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self.key = key

    def start(self, device: int, driver: tuple[str, int], key: bytes, width: int, values: SharedFile) -> int:
        """Fork the worker of a device, which connects to its driver. Return its process id."""
        return super().start(device, driver, self.key, width, values)

    def answer(self, name: str, arguments: Sequence[object]) -> object:
        """Return what a method returns, or why it failed."""
        try:
            assert name in METHODS, f"agents do not {name}"
            return getattr(self, name)(*arguments)
        except Exception as error:  # noqa: BLE001  it is raised in the driver
            return AgentFailure(why=f"{type(error).__name__}: {error}")


def serve_agent(world: RankEnvironment, address: DriverAddress) -> None:
    """Be the agent of this rank until the driver has ended. Connect again after the link was down.

    Raise LaunchError if the driver's machine cannot be reached for `AWAY` seconds.
    """
    key = key_of(world, address)
    until, said = monotonic() + AWAY, False
    while monotonic() < until:
        try:
            channel = connect((address.host, address.port), key, world.rank, PATIENCE, CODEC)
            channel.send(AgentPlace(address=own_address(world), local=world.local))
        except (ConnectionRefusedError, ClosedError):
            return  # the driver does not listen any more
        except OSError as error:
            if not said:
                log.warning("rank %d cannot reach rank 0, and tries for %g s: %s", world.rank, AWAY, error)
                said = True
            sleep(AGAIN)
            continue
        agent = RankAgent(key)
        try:
            while True:
                name, arguments = cast("tuple[str, list[object]]", channel.recv())
                channel.send(sent(agent.answer(name, [*map(received, arguments)])))
        except (ClosedError, OSError):
            until, said = monotonic() + AWAY, False
        finally:
            channel.close()
            agent.close()
    raise lost_leader(world)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMethod:
    """A method of an agent that can be called."""

    begin: Callable[..., "Future[object]"]

    def remote(self, *arguments: object) -> "Future[object]":
        """Begin a call. Arguments that are calls are replaced by their answers."""
        return self.begin(arguments)


class RemoteAgent:
    """The driver's side of an agent. Calls are made one after the other, by a thread."""

    def __init__(self, ask: Callable[[str, list[object]], object], close: Callable[[], None]) -> None:
        self.ask, self.end_of = ask, close
        self.gone = False  # it will never answer again
        self.calls = ThreadPoolExecutor(1, thread_name_prefix="agent")

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(begin=partial(self._begin, name))

    def _begin(self, name: str, arguments: Sequence[object]) -> "Future[object]":
        try:
            return self.calls.submit(self._call, name, arguments)
        except RuntimeError:  # it is closed
            lost: Future[object] = Future()
            lost.set_exception(AgentLostError("the agent has ended"))
            return lost

    def _call(self, name: str, arguments: Sequence[object]) -> object:
        given = [arg.result(PATIENCE) if isinstance(arg, Future) else arg for arg in arguments]
        try:
            answer = self.ask(name, given)
        except (ClosedError, OSError) as error:
            self.gone = True
            raise AgentLostError(str(error)) from error
        if isinstance(answer, AgentFailure):
            raise AgentLostError(answer.why)
        return answer

    def close(self) -> None:
        """End the agent. What it was asked for is not answered any more."""
        self.calls.shutdown(wait=False, cancel_futures=True)
        self.end_of()


def leave(channel: Channel) -> None:
    """Close a channel. A call that waits for an answer ends."""
    with suppress(OSError):
        channel.end.shutdown(socket.SHUT_RDWR)
    channel.close()


def over(channel: Channel, name: str, arguments: list[object]) -> object:
    """Return what the agent at the other end of a channel answers."""
    channel.send((name, [*map(sent, arguments)]))
    return received(channel.recv())


class RankCalls(AgentCalls):
    """Waits for calls of the agents of ranks."""

    lost = (AgentLostError, TimeoutError, CancelledError)

    def __init__(self, world: RankEnvironment) -> None:
        self.world, self.key = world, b""

    @property
    def own(self) -> str:
        """Return the address of the driver's machine."""
        return own_address(self.world)

    @property
    def crowded(self) -> bool:  # type: ignore[override]
        """Return whether workers have to share accelerators."""
        return crowded(self.world.nearby)

    def get(self, call: Any, timeout: float) -> Any:  # noqa: ANN401  answers have no type in common
        """Return the answer to a call."""
        return call.result(timeout)

    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Wait until all calls have ended, at most `timeout` seconds. Return those, and the others."""
        done, waiting = wait(calls, timeout)
        return [*done], [*waiting]

    def put(self, value: Any) -> Any:  # noqa: ANN401
        """Return a value as an argument of several calls."""
        return value

    def keys(self) -> tuple[bytes, bytes]:
        """Return the key of the job. Agents know it."""
        return self.key, b""


class TorchrunStarter(AgentStarter):
    """Starts workers through the agents of ranks, of which this process is rank 0."""

    def __init__(self, program: ProgramLike, versions: AgentVersions, spares: int) -> None:
        """Wait for all ranks. Refuse to train if one does not come, or if copies cannot be kept apart."""
        calls = cast(RankCalls, versions.calls)
        super().__init__(program, versions, calls)
        self.world, self.ranks = calls.world, dict[int, Agent]()
        check_size(self.world, len(program.plans.devices), spares)
        check_key(self.world)
        self.held = ExitStack()
        try:
            self._listen(calls)
            self._await_ranks()
            needed, found = len(self.machines) + -(-spares // self.width), len(self._bundles())
            if found < needed:
                raise no_room(needed, {"rank": float(self.width)}, {}, (needed, found))
        except BaseException:
            self.held.close()
            raise

    def _listen(self, calls: RankCalls) -> None:
        """Publish where agents connect to, and be the first agent."""
        given = given_key()
        launch = "" if given is not None else new_launch()
        calls.key = given if given is not None else self.held.enter_context(offered_key(launch))
        self.held.callback(self._dismiss)  # when it no longer listens, so that no agent connects again
        self.listener = self.held.enter_context(Listener(calls.own, calls.key, PLACE, CODEC))
        host, port = self.listener.address
        address = DriverAddress(host=host, port=port, launch=launch, width=1, agents=True)
        publish_address(self.world, next_launch(self.world), address)
        mine = RankAgent(calls.key)
        self._admit(0, AgentPlace(address=calls.own, local=self.world.local), mine.answer, mine.close)

    def _await_ranks(self) -> None:
        until = monotonic() + PATIENCE
        while missing := [rank for rank in range(self.world.size) if rank not in self.ranks]:
            self._accept(1.0)
            if monotonic() > until:
                raise ranks_absent(missing)

    def _accept(self, timeout: float) -> bool:
        """Take the next rank that has connected. Return whether there was one."""
        arrived = self.listener.accept(timeout)
        if arrived is None:
            return False
        rank, channel = arrived
        try:
            place = channel.recv()
        except (ClosedError, TimeoutError):
            place = None
        if isinstance(place, AgentPlace) and 0 < rank < self.world.size:
            channel.limit(None)  # calls may take long, and each has a timeout of its own
            self._admit(rank, place, partial(over, channel), partial(leave, channel))
        else:
            channel.close()
        return True

    def _admit(
        self,
        rank: int,
        place: AgentPlace,
        ask: Callable[[str, list[object]], object],
        close: Callable[[], None],
    ) -> None:
        if rank in self.ranks:
            self.ranks[rank].actor.close()  # of a link that was down
        self.ranks[rank] = Agent(
            actor=RemoteAgent(ask, close),
            node=str(rank - place.local),  # the first rank of its machine
            address=place.address,
            local=place.local,
        )

    def _bundles(self) -> dict[int, tuple[Agent, ...]]:
        """Return the agents that can take the devices of a machine, by the rank of the first."""
        alive = {rank: agent for rank, agent in sorted(self.ranks.items()) if not agent.actor.gone}
        if not self.apart:
            return {rank: (agent,) for rank, agent in alive.items()}
        nodes: dict[str, dict[int, Agent]] = {}
        for rank, agent in alive.items():
            nodes.setdefault(agent.node, {})[rank] = agent
        return {
            min(found): tuple(found.values())[: self.width]
            for found in nodes.values()
            if len(found) >= self.width
        }

    def _hire(self) -> None:
        while self._accept(0.0):
            continue
        bundles = self._bundles()
        self.agents = {bundle: found for bundle, found in self.agents.items() if bundle in bundles}
        for bundle, agents in bundles.items():
            if self.agents.get(bundle) != agents:
                self._take(bundle, agents)

    def _arrange(self, plans: Plans) -> None:
        self.machines, self.apart = machines_of(plans)
        self.width = max(map(len, self.machines))

    def _lacking(self) -> Exception:
        return LaunchError(
            "too few ranks are left",
            by="launch",
            facts={
                "needs": f"{len(self.machines)} machines with {self.width} ranks each"
                if self.apart
                else f"{len(self.machines)} ranks",
                "has": f"{len(self._bundles())}",
            },
            hint="start all ranks again with --resume, to go on from a checkpoint; claim more spares",
        )

    def _dismiss(self) -> None:
        for agent in self.ranks.values():
            agent.actor.close()

    def close(self) -> None:
        """End the agents. Their ranks wait for the end of this one."""
        self.watch.close()
        self.held.close()
