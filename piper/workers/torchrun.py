"""`local` under torchrun: rank 0 drives, and starts workers through the agents of all ranks."""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

from piper.errors import LaunchError
from piper.runtime.setup import ProgramLike
from piper.workers.agent import Agent, AgentCalls, no_room
from piper.workers.agent_starter import AgentStarter
from piper.workers.processes import ClosedError
from piper.workers.rank_agent import CODEC, AgentLostError, AgentPlace, RankAgent, leave
from piper.workers.rank_environment import RankEnvironment, check_size
from piper.workers.rendezvous import (
    DriverAddress,
    apart,
    check_key,
    given_key,
    offered_key,
    own_address,
    publish_address,
)
from piper.workers.serve import crowded
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel, Listener


class RemoteAgent:
    """The driver's side of an agent. Calls are made one after the other, by a thread."""

    def __init__(self, ask: Callable[[str, list[object]], object], close: Callable[[], None]) -> None:
        self.ask, self.end_of = ask, close
        self.gone = False  # it will never answer again
        self.calls = ThreadPoolExecutor(1, thread_name_prefix="agent")

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=partial(self._begin, name))

    def _begin(self, name: str, *arguments: object) -> "Future[object]":
        """Begin a call. Arguments that are calls are replaced by their answers."""
        try:
            return self.calls.submit(self._call, name, arguments)
        except RuntimeError:  # it is closed
            lost: Future[object] = Future()
            lost.set_exception(AgentLostError("the agent has ended"))
            return lost

    def _call(self, name: str, arguments: Sequence[object]) -> object:
        given = [arg.result(TIMEOUTS.meeting) if isinstance(arg, Future) else arg for arg in arguments]
        try:
            answer = self.ask(name, given)
        except (ClosedError, OSError) as error:
            self.gone = True
            raise AgentLostError(str(error)) from error
        if isinstance(answer, AgentLostError):
            raise answer
        return answer

    def close(self) -> None:
        """End the agent. What it was asked for is not answered any more."""
        self.calls.shutdown(wait=False, cancel_futures=True)
        self.end_of()


def over(channel: Channel, name: str, arguments: list[object]) -> object:
    """Return what the agent at the other end of a channel answers."""
    channel.send((name, arguments))
    return channel.recv()


class RankCalls(AgentCalls):
    """Waits for calls of the agents of ranks."""

    lost = (AgentLostError, TimeoutError, CancelledError)

    def __init__(self, world: RankEnvironment) -> None:
        self.world, self.key = world, b""
        self.crowded = crowded(world.nearby)

    @property
    def own(self) -> str:
        return own_address(self.world)

    def get(self, call: Any, timeout: float = TIMEOUTS.meeting) -> Any:  # noqa: ANN401  answers have no type in common
        return call.result(timeout)

    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done, waiting = wait(calls, timeout)
        return [*done], [*waiting]

    def put(self, value: bytes) -> bytes:
        return value

    def keys(self) -> tuple[bytes, bytes]:
        """Return the key of the job. Agents know it."""
        return self.key, b""


class TorchrunStarter(AgentStarter):
    """Starts workers through the agents of ranks, of which this process is rank 0."""

    def __init__(
        self, program: ProgramLike, world: RankEnvironment, protects: bool = False, spares: int = 0
    ) -> None:
        """Wait for all ranks. Refuse to train if one does not come, or if copies cannot be kept apart."""
        check_size(world, len(program.plans.devices), spares)
        check_key(world)
        calls = RankCalls(world)
        super().__init__(program, calls, protects)
        self.world, self.spares = world, spares
        self.ranks: dict[int, Agent] = {}
        try:
            with ExitStack() as until_all_came:
                self._listen(calls, until_all_came)
                until = monotonic() + TIMEOUTS.meeting
                while missing := [rank for rank in range(world.size) if rank not in self.ranks]:
                    self._accept(TIMEOUTS.accept)
                    if monotonic() > until:
                        absent = f"rank {', '.join(map(str, missing))}"
                        raise apart(world, f"{absent} did not launch within {TIMEOUTS.meeting:g} s")
            needed, bundles = len(self.machines) + -(-spares // self.width), len(self._bundles())
            if bundles < needed:
                raise no_room(needed, {"rank": float(self.width)}, {}, (needed, bundles))
        except BaseException:
            self.cleanup.close()
            raise

    def _listen(self, calls: RankCalls, until_all_came: ExitStack) -> None:
        """Publish where agents connect to, and be the first agent. Offer a key until all came."""
        given = given_key()
        launch = "" if given is not None else secrets.token_hex(16)
        calls.key = given if given is not None else until_all_came.enter_context(offered_key(launch))
        self.cleanup.callback(self._dismiss)  # when it no longer listens, so that no agent connects again
        self.listener = Listener(calls.own, calls.key, TIMEOUTS.rank_place, CODEC)
        self.cleanup.callback(self.listener.close)
        host, port = self.listener.address
        address = DriverAddress(host=host, port=port, launch=launch, spares=self.spares > 0)
        publish_address(self.world, address)
        mine = RankAgent(calls.key)
        place = AgentPlace(address=calls.own, local=self.world.local)
        self._admit(0, place, RemoteAgent(mine.answer, mine.close))

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
            self._admit(rank, place, RemoteAgent(partial(over, channel), partial(leave, channel)))
        else:
            channel.close()
        return True

    def _admit(self, rank: int, place: AgentPlace, actor: RemoteAgent) -> None:
        if rank in self.ranks:
            self.ranks[rank].actor.close()  # of a link that was down
        self.ranks[rank] = Agent(
            actor=actor,
            node=str(rank - place.local),  # the first rank of its machine
            address=place.address,
            local=place.local,
        )

    def _bundles(self) -> dict[int, tuple[Agent, ...]]:
        """Return the agents that can take the devices of a machine, by the rank of the first."""
        alive = {rank: agent for rank, agent in sorted(self.ranks.items()) if not agent.actor.gone}
        groups: dict[object, dict[int, Agent]] = {}  # by machine, where devices have to share one
        for rank, agent in alive.items():
            groups.setdefault(agent.node if self.apart else rank, {})[rank] = agent
        full = [ranks for ranks in groups.values() if len(ranks) >= self.width]
        return {min(ranks): tuple(ranks.values())[: self.width] for ranks in full}

    def _hire(self) -> None:
        while self._accept(0.0):
            continue
        bundles = self._bundles()
        self.bundles = {name: known for name, known in self.bundles.items() if name in bundles}
        for name, agents in bundles.items():
            if name not in self.bundles or self.bundles[name].agents != agents:
                self._take(name, agents)

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
