"""`ray`: every device is an actor of a Ray cluster, on one node or many."""

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor

from piper.launchers.base import Run, streams_of
from piper.launchers.driver import RemoteRun, SocketWorkerGroup, devices_of
from piper.launchers.messages import CODEC, PATIENCE, Assignment, StoreAddress
from piper.launchers.processes import NodeMonitor, ProcessStatus, SharedFile, StopWatch, Termination
from piper.launchers.ray_support import ActorLocation, bundle_of, folder_of_ray, no_room, not_started, reason
from piper.launchers.rendezvous import LOOPBACK, store_on
from piper.launchers.transport.channel import Listener, connect
from piper.launchers.transport.fork_server import die_with
from piper.launchers.transport.shared_memory import (
    Bytes,
    HeldValues,
    TensorEntry,
    joined,
    map_marks,
    new_marks,
)
from piper.launchers.transport.versions import Versions
from piper.launchers.worker_server import WorkerServer, serve
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.worker import Options

GROUP = 60.0  # seconds that a cluster may take to find resources for all actors
END = 10.0  # seconds that cleaning up after a failure may take
LOOK = 2.0  # seconds between two looks at all workers while they do not answer
SLOWEST = 10.0  # seconds without progress that a job is given at least, because looks are rare
STOPPED = 3.0  # seconds for which a worker must be seen stopped to count as lost


class Actor:
    """A worker as Ray runs it."""

    def __init__(self, width: int) -> None:
        die_with(os.getppid())  # a stopped actor would outlive its raylet
        self.termination = Termination()
        self.termination.install()
        self.descriptor = new_marks(width)
        self.marks = map_marks(self.descriptor)

    def location(self) -> ActorLocation:
        """Return where this actor runs."""
        return ActorLocation(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            process=os.getpid(),
            marks=SharedFile.of(self.descriptor),
        )

    def host(self, address: str) -> int:
        """Keep the store at which all workers meet. Return its port."""
        self.store = store_on(address)
        return self.store.port

    def work(self, device: int, memory: Bytes, driver: tuple[str, int], key: bytes) -> None:
        """Be the worker of a device until the driver is gone.

        Its calls come over a socket: one through Ray takes milliseconds, as long as many a step.
        """
        channel = connect(driver, key, device, PATIENCE, CODEC)
        given = cast(Assignment, channel.recv())
        serve(
            channel,
            given,
            lambda: WorkerServer(given, HeldValues(memory, given.values), self.marks),
            self.termination,
        )


class RayWorkerGroup(SocketWorkerGroup):
    """Workers that are actors. A monitor on every node reads their progress and state."""

    grace = 3.0  # Ray takes its time to report a death

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        group: PlacementGroup,
        gpus: int,
        bundles: Sequence[int] | None = None,
        versions: Mapping[int, tuple[SharedFile, ...]] | None = None,
    ) -> None:
        """Start an actor for each device.

        bundles: which of the group's to use. None: the first ones. versions: the memory for copies of the
        state, which is used if all actors are on the driver's machine. None: none are kept.
        """
        super().__init__(program, options)
        self.versions = versions
        self.locations: dict[int, ActorLocation] = {}
        self.monitors: dict[str, Any] = {}  # by node
        self.working: dict[Any, int] = {}  # calls that last as long as their actors work
        self.lost: dict[int, str] = {}
        self.stops = StopWatch(STOPPED)
        self.looked = (monotonic(), dict[int, ProcessStatus]())
        self.moved: dict[int, ProcessStatus] = {}  # the statuses at the last call of `moving`
        remote, width = ray.remote(Actor), streams_of(program.plans)
        self.actors: dict[int, Any] = {}
        chosen = range(len(self.devices)) if bundles is None else bundles
        for i, device in zip(
            chosen, self.devices, strict=True
        ):  # they start while the driver builds the model
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            self.actors[device] = remote.options(
                num_cpus=1, num_gpus=gpus, scheduling_strategy=place, max_restarts=0
            ).remote(width)

    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, held: ExitStack
    ) -> None:
        memory = ray.put(joined(weights, index).numpy())
        self.locations = self._locations()
        self.processes = {device: location.process for device, location in self.locations.items()}
        addresses = {location.address for location in self.locations.values()}
        alone = len(addresses) == 1
        self.own = {d: LOOPBACK if alone else location.address for d, location in self.locations.items()}
        first = self.devices[0]
        self.port = ray.get(self.actors[first].host.remote(self.own[first]), timeout=PATIENCE)
        watching = self._watch()
        mine: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.protects = self.versions is not None and addresses == {mine}
        reached, key = LOOPBACK if addresses == {mine} else mine, secrets.token_bytes(32)
        with Listener(reached, key, self.options.timeout, CODEC) as listener:
            for device, actor in self.actors.items():
                self.working[actor.work.remote(device, memory, listener.address, key)] = device
            until = monotonic() + PATIENCE
            while len(self.channels) < len(self.devices):
                self._accept(listener, until)
        try:
            ray.get(watching, timeout=PATIENCE)
        except (RayError, GetTimeoutError) as error:
            raise not_started(str(error).splitlines()[0]) from error

    def _watch(self) -> list[Any]:
        """Start a monitor on every node. Return the calls that have ended when all of them watch."""
        calls = []
        for node, locations in self._by_node().items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)  # on this node or nowhere
            options = {"num_cpus": 0, "scheduling_strategy": place, "max_restarts": 0}
            self.monitors[node] = ray.remote(NodeMonitor).options(**options).remote()
            workers = {device: (location.process, location.marks) for device, location in locations.items()}
            calls.append(self.monitors[node].hold.remote(workers))
        return calls

    def _accept(self, listener: Listener, until: float) -> None:
        arrived = listener.accept(1.0)
        if arrived is not None:
            device, self.channels[device] = arrived
        elif lost := self.ended():
            raise not_started(next(iter(lost.values())))
        elif monotonic() > until:
            raise not_started("it cannot reach the driver")

    def _locations(self) -> dict[int, ActorLocation]:
        asked = [actor.location.remote() for actor in self.actors.values()]
        try:
            return dict(zip(self.actors, ray.get(asked, timeout=PATIENCE), strict=True))
        except (RayError, GetTimeoutError) as error:
            raise not_started(str(error).splitlines()[0]) from error

    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        store = StoreAddress(host=self.own[self.devices[0]], port=self.port, own=self.own[device])
        return Assignment(
            device=device,
            local=0,
            store=store,
            options=self.options,
            setup=setup,
            values=index,
            versions=self.versions if self.protects else None,
        )

    def ended(self) -> dict[int, str]:
        done, _ = ray.wait(list(self.working), num_returns=len(self.working), timeout=0)
        for ref in done:
            device = self.working[ref]
            if device not in self.lost:
                try:
                    ray.get(ref)
                except RayError as error:
                    self.lost[device] = f"the process died{reason(error)}"
        return self.lost

    def moving(self) -> bool:
        before, self.moved = self.moved, self._recent()
        return bool(before) and before != self.moved

    def stopped(self) -> set[int]:
        return {d for d, seen in self._recent().items() if self.stops.lasting(seen.process, seen.stopped)}

    def _recent(self) -> dict[int, ProcessStatus]:
        """Return the statuses of all devices, at most a few seconds old."""
        when, seen = self.looked
        if monotonic() - max(when, self.asked) > LOOK:  # it costs a call to every node
            seen = self.statuses()
            self.looked = (monotonic(), seen)
        return seen

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return what the monitors see: an actor may no longer answer."""
        ended = self.ended()
        seen = {device: ProcessStatus(process=process) for device, process in self.processes.items()}
        for ref in [monitor.look.remote() for monitor in self.monitors.values()]:
            try:
                seen |= ray.get(ref, timeout=END)
            except (RayError, GetTimeoutError):
                continue  # the node is gone too
        return {device: replace(seen[device], ended=ended.get(device)) for device in self.devices}

    def _by_node(self) -> dict[str, dict[int, ActorLocation]]:
        nodes: dict[str, dict[int, ActorLocation]] = {}
        for device, location in self.locations.items():
            nodes.setdefault(location.node, {})[device] = location
        return nodes

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for actor in self.actors.values():
            ray.kill(actor)
        nodes = self._by_node()
        swept = [monitor.sweep.remote(list(nodes[node])) for node, monitor in self.monitors.items()]
        if swept:
            ray.wait(swept, num_returns=len(swept), timeout=END)
        for monitor in self.monitors.values():
            ray.kill(monitor)
        for held in (self.channels, self.actors, self.locations, self.monitors):
            held.clear()


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
def resources(devices: int, gpus: int) -> Iterator[PlacementGroup]:
    """Claim the resources of an actor for each device, spares included."""
    bundle = bundle_of(gpus)
    group = placement_group([dict(bundle) for _ in range(devices)], strategy="PACK")
    try:
        if not group.wait(GROUP):
            raise no_room(devices, bundle, ray.cluster_resources())  # type: ignore[no-untyped-call]
        yield group
    finally:
        remove_placement_group(group)


@contextmanager
def launch_ray(program: ProgramLike, options: Options | None = None) -> Iterator[RemoteRun]:
    """Start a program on actors of Ray, and end them with the block.

    A Ray that is initialised already is used, with all its nodes. Otherwise one is started, which listens on
    this machine only, and is stopped again.
    """
    devices = len(devices_of(program.plans))
    gpus = int(setup_of(program).device.type == "cuda")
    with cluster(devices), resources(devices, gpus) as placed, ExitStack() as held:
        group = RayWorkerGroup(program, options or Options(), placed, gpus)
        held.callback(group.close)
        run = group.start()
        held.callback(run.close)
        yield run


class RayStarter:
    """Starts the actors of a program again and again, on the nodes that are left."""

    def __init__(self, program: ProgramLike, versions: Versions, spares: int) -> None:
        """Claim resources for every device and for spares; a cluster without room for all is refused."""
        self.program, self.versions, self.spares = program, versions, spares
        self.devices = len(devices_of(program.plans))
        self.gpus = int(setup_of(program).device.type == "cuda")
        self.packed: bytes | None = None
        self.group: RayWorkerGroup | None = None
        self.nodes: dict[int, str] = {}  # of the devices at the last start
        self.held = ExitStack()
        try:
            self.held.enter_context(cluster(self.devices + spares))
            self.placed = self.held.enter_context(resources(self.devices + spares, self.gpus))
        except BaseException:
            self.held.close()
            raise

    def start(self, options: Options) -> RemoteRun:
        """Start an actor for each device."""
        group = self.group = RayWorkerGroup(
            self.program, options, self.placed, self.gpus, self._bundles(), self.versions.files
        )
        group.packed = self.packed
        try:
            run = group.start()
        except RayError as error:
            group.close()
            raise not_started(str(error).splitlines()[0]) from error
        except BaseException:
            group.close()
            raise
        self.packed = group.packed
        self.nodes = {device: location.node for device, location in group.locations.items()}
        return run

    def _bundles(self) -> list[int]:
        """Return a bundle for each device that lies on a node that lives. Ray moves lost ones if it can.

        Ray takes half a minute to see that a node is lost. So a node on which an actor has just died is
        avoided, where there are spares.
        """
        until = monotonic() + GROUP
        died = () if self.group is None else self.group.lost
        suspects = {self.nodes[device] for device in died if device in self.nodes}
        while True:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            alive = {node["NodeID"] for node in nodes if node["Alive"]}
            where = placement_group_table(self.placed)["bundles_to_node_id"]
            found = sorted((node in suspects, int(index)) for index, node in where.items() if node in alive)
            if len(found) >= self.devices:
                return [bundle for _, bundle in found[: self.devices]]
            if monotonic() > until:
                has = ray.cluster_resources()  # type: ignore[no-untyped-call]
                raise no_room(self.devices, bundle_of(self.gpus), has)
            sleep(LOOK)

    def expect(self, run: Run, stall: float) -> None:
        """Let a run end when nothing has moved for so many seconds; a look at all nodes takes some."""
        assert self.group is not None
        self.group.stall = max(stall, SLOWEST)

    def close(self) -> None:
        """Give the resources back, and end a Ray of our own."""
        self.held.close()
