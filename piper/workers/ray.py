"""`ray`: every device is a worker on a node of a Ray cluster, started by an agent that is an actor."""

import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy
import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piper.errors import LaunchError
from piper.plan.plan import Plans
from piper.process.attributes import replaced
from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.workers.agent import Agent, AgentCalls, AgentProcess, machines_of, no_room
from piper.workers.agent_starter import AgentStarter
from piper.workers.processes import folder_for_now
from piper.workers.timeouts import TIMEOUTS


@contextmanager
def cluster(devices: int) -> Iterator[None]:
    """Use a Ray that is initialised or named, or start one on this machine that ends with the block."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    with ExitStack() as cleanup:
        if address:
            join(address)
        else:
            folder = cleanup.enter_context(folder_for_now("piper-ray-"))
            with loopback():
                ray.init(
                    address="local",
                    num_cpus=max(devices, os.cpu_count() or 1),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                )
        cleanup.callback(ray.shutdown)
        yield


def join(address: str) -> None:
    """Connect to the Ray cluster of an address: HOST:PORT, ray://HOST:PORT, or auto."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUTS.ray_answers).close()
        ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:  # a ConnectionError is an OSError
        why = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise LaunchError(
            "the Ray cluster cannot be reached",
            by="RAY_ADDRESS",
            facts={"address": address, "why": why[0].strip()},
            hint="check that it runs (`ray status` on its head), and that this machine reaches the port and "
            "has its token; without RAY_ADDRESS a Ray of its own is started here",
        ) from error


def loopback() -> AbstractContextManager[None]:
    """Let a Ray that is started inside listen on this machine only.

    Ray does so by itself where it supports no clusters; given a loopback address it takes another instead.
    """
    return replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)


@contextmanager
def resources(bundles: int, bundle: Mapping[str, float], *, apart: bool) -> Iterator[PlacementGroup]:
    """Claim resources for agents, spares included. apart: each bundle on a node of its own."""
    strategy = "STRICT_SPREAD" if apart else "PACK"
    group = placement_group([dict(bundle) for _ in range(bundles)], strategy=strategy)
    try:
        if not group.wait(TIMEOUTS.machines_come):
            raise lacking(bundles, bundle, apart=apart)
        yield group
    finally:
        remove_placement_group(group)


def lacking(bundles: int, bundle: Mapping[str, float], *, apart: bool) -> Exception:
    """Return the error of a cluster that has no room for these bundles."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    fitting = sum(all(has.get(name, 0) >= amount for name, amount in bundle.items()) for has in nodes)
    has = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return no_room(bundles, bundle, has, (bundles, fitting) if apart else None)


class RayCalls(AgentCalls):
    """Waits for calls of actors."""

    lost = (RayError, GetTimeoutError)

    @property
    def own(self) -> str:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return address

    def get(self, call: Any, timeout: float = TIMEOUTS.meeting) -> Any:  # noqa: ANN401  Ray's references have no type
        return ray.get(call, timeout=timeout)

    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done, waiting = ray.wait([*calls], num_returns=len(calls), timeout=timeout) if calls else ([], [])
        return done, waiting

    def put(self, value: bytes) -> Any:  # noqa: ANN401
        return ray.put(numpy.frombuffer(value, numpy.uint8))  # Ray copies the bytes of an array less often

    def keys(self) -> tuple[bytes, bytes]:
        """Return a new key, which goes to agents as it is: Ray protects its messages, or does not."""
        key = secrets.token_bytes(32)
        return key, key


class RayStarter(AgentStarter):
    """Starts workers through agents that are actors, on the nodes that are left.

    A Ray that is initialised already is used, with all its nodes. Otherwise one is started, which listens on
    this machine only, and is stopped again. Bundles are claimed when the job starts, and Ray gives those of a
    lost node to another one.
    """

    def __init__(self, program: ProgramLike, protects: bool, spares: int) -> None:
        """Claim resources for every device and for spares; a cluster without room for all is refused."""
        super().__init__(program, RayCalls(), protects)
        self.gpus = int(is_accelerator(program.device))
        room = float(self.width)
        self.bundle = {"CPU": room, "GPU": room} if self.gpus else {"CPU": room}
        count = len(self.machines) + -(-spares // self.width)
        try:
            self.cleanup.enter_context(cluster(count * self.width))
            self.placed = self.cleanup.enter_context(resources(count, self.bundle, apart=self.apart))
            self.cleanup.callback(self._dismiss)
        except BaseException:
            self.cleanup.close()
            raise

    def _hire(self) -> None:
        """Start agents in bundles that have none, or whose node Ray has replaced."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        where = placement_group_table(self.placed)["bundles_to_node_id"]
        for bundle, node in ((int(index), node) for index, node in where.items()):
            known = self.bundles.get(bundle)
            if known is not None and known.agents[0].node == node and node in alive:
                continue
            self.bundles.pop(bundle, None)
            if node in alive:
                place = PlacementGroupSchedulingStrategy(self.placed, placement_group_bundle_index=bundle)
                actor = ray.remote(AgentProcess).options(
                    num_cpus=1, num_gpus=self.gpus, scheduling_strategy=place, max_restarts=0
                )
                agents = [
                    Agent(actor=actor.remote(), node=node, address=alive[node]) for _ in range(self.width)
                ]
                self._take(bundle, tuple(agents))

    def _arrange(self, plans: Plans) -> None:
        self.machines, self.apart = machines_of(plans, self.width)  # bundles stay as they were claimed

    def _lacking(self) -> Exception:
        return lacking(len(self.machines), self.bundle, apart=self.apart)

    def _dismiss(self) -> None:
        for agent in self._without(()):
            ray.kill(agent.actor)
