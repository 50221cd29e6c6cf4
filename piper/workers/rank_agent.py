"""The agent of a rank of a torchrun job: it forks the worker of a device, or waits as a spare.

Rank 0 drives and has an agent too. torchrun sees the ranks only, so a worker that is lost does not end them.
When a machine is lost its ranks are gone. A rank whose link was down connects again, as a spare.
"""

import atexit
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import cast

from piper.errors import LaunchError
from piper.workers.agent import MachineAgent
from piper.workers.processes import ClosedError, ProcessStatus, SharedFile, Termination, gone, stopped
from piper.workers.rank_environment import RankEnvironment
from piper.workers.rendezvous import (
    HOW,
    DriverAddress,
    addresses,
    check_key,
    ending,
    key_of,
    lost_leader,
    own_address,
)
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel, connect
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.serialize import Codec

log = logging.getLogger("piper")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """The first message of an agent: where it runs."""

    address: str
    local: int


class AgentLostError(ConnectionError):
    """An agent cannot be reached any more. As an answer: it could not do what it was asked for, and where."""

    def __init__(self, what: str, trace: str = "") -> None:
        super().__init__(what, trace)
        if trace:
            self.add_note(f"In the agent:\n{trace}")

    def __str__(self) -> str:
        return str(self.args[0])


def failed(error: Exception) -> AgentLostError:
    """Return an exception as text, because the driver may not know its class."""
    return AgentLostError(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


CODEC = Codec((AgentPlace, AgentLostError, ProcessStatus, SharedFile))


class RankAgent(MachineAgent):
    """The agent of a rank. Its workers prove that they know the key of the job, which is never sent."""

    warm_servers: list[ForkServer] = []  # noqa: RUF012  of agents that have ended: the next need not import torch

    def warm(self) -> None:
        """Start the fork server, or take that of an agent that has ended."""
        if self.forks is None:
            with suppress(IndexError):
                self.forks = self.warm_servers.pop()
        super().warm()

    def terminate(self) -> None:
        """Send SIGTERM to the worker, which reports it to the driver: the system ends this rank."""
        if self.process:
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGTERM)

    def answer(self, name: str, arguments: Sequence[object]) -> object:
        """Return what a method returns, or why it failed."""
        try:
            assert name in METHODS, f"agents do not {name}"
            return getattr(self, name)(*arguments)
        except Exception as error:  # noqa: BLE001  it is raised in the driver
            return failed(error)

    def close(self) -> None:
        """End the worker and give the memory back. The fork server stays for the next agent of the rank."""
        self.end()
        if self.forks is not None and not (gone(self.forks.server) or stopped(self.forks.server)):
            self.warm_servers.append(self.forks)
            self.forks = None
        super().close()


# What a driver may call.
METHODS = frozenset([*(name for name in vars(MachineAgent) if not name.startswith("_")), "look", "end"])


class ServedAgent:
    """The agent of this rank for one launch, which a thread serves until the driver has ended."""

    def __init__(self, world: RankEnvironment, address: DriverAddress) -> None:
        """Start the thread."""
        self.world, self.address = world, address
        self.key = key_of(world, address)
        self.agent: RankAgent | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits
            self.error = error

    def _serve(self) -> None:
        """Connect and answer calls until the driver does not listen. Connect again after a link was down."""
        where = self.address.host, self.address.port
        until, known, said = monotonic() + TIMEOUTS.rank_away, False, False
        while monotonic() < until:
            try:
                channel = connect(where, self.key, self.world.rank, TIMEOUTS.meeting, CODEC)
                channel.send(AgentPlace(address=own_address(self.world), local=self.world.local))
            except ConnectionRefusedError:
                return  # the driver does not listen any more
            except ClosedError as error:
                if known:
                    return
                raise LaunchError(
                    "this rank and rank 0 do not know the same key",
                    by=f"rank {self.world.rank}",
                    facts={"at": f"{where[0]}:{where[1]}", "why": str(error)},
                    hint=HOW,
                ) from error
            except OSError as error:
                if not said:
                    text = "rank %d cannot reach rank 0, and tries for %g s: %s"
                    log.warning(text, self.world.rank, TIMEOUTS.rank_away, error)
                said = True
                sleep(TIMEOUTS.rank_retry)
                continue
            self._answer(channel)
            until, known, said = monotonic() + TIMEOUTS.rank_away, True, False
        raise lost_leader(self.world)

    def _answer(self, channel: Channel) -> None:
        """Answer the calls of the driver until the channel is closed."""
        agent = self.agent = RankAgent(self.key)
        try:
            while True:
                name, arguments = cast("tuple[str, list[object]]", channel.recv())
                answer = agent.answer(name, arguments)
                try:
                    channel.send(answer)
                except TypeError as error:  # a message cannot hold the answer: nothing of it was sent
                    channel.send(failed(error))
        except (ClosedError, OSError):
            return
        finally:
            self.agent = None
            channel.close()
            agent.close()

    def busy(self) -> bool:
        """Return whether the driver is still there. Raise what has ended the thread instead."""
        if self.error is not None:
            raise self.error
        return self.thread.is_alive()

    def terminate(self) -> None:
        """Pass on that the system has asked this rank to end, unless a spare replaces it then."""
        if (agent := self.agent) is not None and not self.address.spares:
            agent.terminate()

    def wait(self) -> None:
        """Wait until the driver has ended."""
        self.thread.join()
        self.busy()


def leave(channel: Channel) -> None:
    """Close a channel. A thread that waits for a message ends."""
    with suppress(OSError):
        channel.end.shutdown(socket.SHUT_RDWR)
    channel.close()


@atexit.register
def close_warm_servers() -> None:
    """End the fork servers that no agent uses."""
    while RankAgent.warm_servers:
        RankAgent.warm_servers.pop().close()


def attend(world: RankEnvironment) -> int:
    """Have an agent for everything that rank 0 launches, until it is done. Return this rank's exit code.

    torchrun passes SIGTERM and Ctrl-C on to every rank. Rank 0 acts on them: it saves, and needs this rank.
    """
    termination = Termination()
    termination.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    check_key(world)
    RankAgent.warm_servers.append(ForkServer())  # it imports torch while rank 0 compiles
    agents: list[ServedAgent] = []

    def leaves() -> bool:
        busy = [agent for agent in agents if agent.busy()]
        if termination.asked:
            for agent in busy:
                agent.terminate()
        return termination.asked and not busy

    for address in addresses(world, leaves):
        agents.append(ServedAgent(world, address))
    for agent in agents:
        agent.wait()
    return ending(world)
