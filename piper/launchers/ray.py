"""`ray`: every device is a worker on a node of a Ray cluster, started by an agent that is an actor."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep
from typing import Any, cast

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

from piper.launchers.base import Run
from piper.launchers.driver import RemoteRun
from piper.launchers.machine_agent import MachineAgent
from piper.launchers.ray_support import (
    bundle_of,
    folder_of_ray,
    machines_of,
    no_room,
    not_started,
)
from piper.launchers.ray_versions import REACH, Agent, RayVersions
from piper.launchers.ray_workers import RayWorkerGroup
from piper.launchers.transport.versions import Versions
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.worker import Options

GROUP = 60.0  # seconds that a cluster may take to find resources for all agents
LOOK = 2.0  # seconds between two looks at whether there is room
SOON = 0.1  # seconds between two looks at which agents have answered
SLOWEST = 10.0  # seconds without progress that a job is given at least, because looks are rare


@contextmanager
def cluster(devices: int) -> Iterator[None]:
    """Use a Ray that is initialised or named, or start one on this machine that ends with the block."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    with ExitStack() as held:
        if address:
            ray.init(address=address, logging_level=logging.ERROR)
        else:
            folder = held.enter_context(folder_of_ray())
            with loopback():
                ray.init(
                    address="local",
                    num_cpus=max(devices, os.cpu_count() or 1),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _temp_dir=folder,
                )
        held.callback(ray.shutdown)
        yield


@contextmanager
def loopback() -> Iterator[None]:
    """Let a Ray that is started inside listen on this machine only.

    Ray does so by itself where it supports no clusters; given a loopback address it takes another instead.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def resources(bundles: int, bundle: Mapping[str, float], *, apart: bool) -> Iterator[PlacementGroup]:
    """Claim resources for agents, spares included. apart: each bundle on a node of its own."""
    strategy = "STRICT_SPREAD" if apart else "PACK"
    group = placement_group([dict(bundle) for _ in range(bundles)], strategy=strategy)
    try:
        if not group.wait(GROUP):
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


@contextmanager
def launch_ray(program: ProgramLike, options: Options | None = None) -> Iterator[RemoteRun]:
    """Start a program on nodes of Ray, and end its workers with the block.

    A Ray that is initialised already is used, with all its nodes. Otherwise one is started, which listens on
    this machine only, and is stopped again.
    """
    starter = RayStarter(program, None, 0)
    with ExitStack() as held:
        held.callback(starter.close)
        run = starter.start(options or Options())
        assert starter.group is not None
        held.callback(starter.group.close)
        held.callback(run.close)
        yield run


def finished(calls: Sequence[Any], timeout: float = 0.0) -> bool:
    """Return whether all of these calls have ended. A call that was lost has ended too."""
    return not calls or not ray.wait([*calls], num_returns=len(calls), timeout=timeout)[1]


class RayStarter:
    """Starts the workers of a program again and again, through agents on the nodes that are left.

    Each bundle of resources has an agent for each device of a machine. Agents of spares import torch too.
    """

    def __init__(self, program: ProgramLike, versions: Versions | None, spares: int) -> None:
        """Claim resources for every device and for spares; a cluster without room for all is refused."""
        assert versions is None or isinstance(versions, RayVersions)
        self.program, self.versions = program, versions
        self.machines, self.apart = machines_of(program.plans)
        self.width = max(map(len, self.machines))
        gpus = int(setup_of(program).device.type == "cuda")
        self.bundle = {name: self.width * amount for name, amount in bundle_of(gpus).items()}
        self.gpus, self.packed = gpus, cast("bytes | None", None)
        self.group: RayWorkerGroup | None = None
        self.agents: dict[int, tuple[Agent, ...]] = {}  # by bundle
        self.warm: dict[int, list[Any]] = {}  # calls that end when the agents of a bundle are warm
        self.used: dict[int, int] = {}  # the bundle of each machine
        self.avoided: set[int] = set()  # bundles that are used only if there are no others
        self.held = ExitStack()
        count = len(self.machines) + -(-spares // self.width)
        try:
            self.held.enter_context(cluster(count * self.width))
            self.placed = self.held.enter_context(resources(count, self.bundle, apart=self.apart))
            self.held.callback(self._dismiss)
        except BaseException:
            self.held.close()
            raise

    @property
    def near(self) -> bool:
        """Return whether all workers are on the driver's machine, and see its memory."""
        mine: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return self.group is None or {a.address for a in self.group.agents.values()} == {mine}

    def start(self, options: Options) -> RemoteRun:
        """Start a worker for each device."""
        try:
            agents = self._agents()
            if self.versions is not None:
                self.versions.place(agents)
            group = self.group = RayWorkerGroup(self.program, options, agents, self.versions)
            group.packed = self.packed
            try:
                run = group.start()
            except BaseException:
                group.close()
                raise
        except (RayError, GetTimeoutError) as error:
            raise not_started(str(error).splitlines()[0]) from error
        self.packed = group.packed
        return run

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        """Start the workers of another program from now on, on any bundles that live."""
        assert isinstance(versions, RayVersions)
        self.program, self.versions = program, versions
        self.machines, self.apart = machines_of(program.plans)
        self.packed = getattr(program, "packed", None)  # of one that came as bytes from another process

    def avoid(self, device: int | None) -> None:
        """Start the worker of a device on a spare next time, if there is one, with others of its machine."""
        for machine, bundle in self.used.items():
            if device in self.machines[machine]:
                self.avoided = {bundle}

    def _hire(self) -> None:
        """Start agents in bundles that have none, or whose node Ray has replaced."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        where = placement_group_table(self.placed)["bundles_to_node_id"]
        for bundle, node in ((int(index), node) for index, node in where.items()):
            known = self.agents.get(bundle)
            if known is not None and known[0].node == node and node in alive:
                continue
            self.agents.pop(bundle, None)
            if node in alive:
                place = PlacementGroupSchedulingStrategy(self.placed, placement_group_bundle_index=bundle)
                made = ray.remote(MachineAgent).options(
                    num_cpus=1, num_gpus=self.gpus, scheduling_strategy=place, max_restarts=0
                )
                self.agents[bundle] = tuple(
                    Agent(actor=made.remote(), node=node, address=alive[node]) for _ in range(self.width)
                )
                self.warm[bundle] = [agent.actor.warm.remote() for agent in self.agents[bundle]]

    def _agents(self) -> dict[int, Agent]:
        """Return an agent for each device. Those that still answer are used again, then warm ones."""
        until = monotonic() + GROUP
        while True:
            self._hire()
            ranks = self._ranks()
            before = {bundle: machine for machine, bundle in self.used.items()}
            usable = sorted(ranks, key=lambda b: (b in self.avoided, b not in before, ranks[b], b))
            if len(usable) >= len(self.machines):
                chosen = usable[: len(self.machines)]
                kept = {m: b for m, b in self.used.items() if b in chosen and m < len(self.machines)}
                free = iter(bundle for bundle in chosen if bundle not in kept.values())
                self.used = {m: kept[m] if m in kept else next(free) for m in range(len(self.machines))}
                return {
                    device: agent
                    for machine, bundle in self.used.items()
                    for device, agent in zip(self.machines[machine], self.agents[bundle], strict=False)
                }
            if monotonic() > until:
                raise lacking(len(self.machines), self.bundle, apart=self.apart)
            sleep(LOOK)

    def _ranks(self) -> dict[int, int]:
        """Return the bundles whose agents live: 0 if they are warm and answer, 1 if they still start.

        Ray takes half a minute to see that a node is lost, so agents are asked.
        """
        found = {bundle: 1 for bundle in self.agents if not finished(self.warm[bundle])}
        asked = {
            bundle: [agent.actor.look.remote() for agent in agents]
            for bundle, agents in self.agents.items()
            if bundle not in found
        }
        until = monotonic() + REACH
        while sum(map(finished, asked.values())) < len(self.machines) and monotonic() < until:
            finished([call for calls in asked.values() for call in calls], SOON)
        for bundle, calls in asked.items():
            try:
                if finished(calls):
                    ray.get(calls)
                    found[bundle] = 0
            except RayError:
                del self.agents[bundle]  # others take their place, if the node lives
        return found

    def _dismiss(self) -> None:
        for agent in (agent for agents in self.agents.values() for agent in agents):
            ray.kill(agent.actor)

    def expect(self, run: Run, stall: float) -> None:
        """Let a run end when nothing has moved for so many seconds; a look at all nodes takes some."""
        assert self.group is not None
        self.group.stall = max(stall, SLOWEST)

    def close(self) -> None:
        """End the agents, give the resources back, and end a Ray of our own."""
        self.held.close()
