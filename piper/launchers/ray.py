"""`ray`: every device is an actor of a Ray cluster, on one node or many."""

import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, cast

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from torch import Tensor

from piper.errors import LaunchError
from piper.launchers.base import streams_of
from piper.launchers.driver import RemoteRun, SocketWorkerGroup, devices_of
from piper.launchers.messages import CODEC, PATIENCE, Assignment, StoreAddress
from piper.launchers.processes import NodeMonitor, ProcessStatus, SharedFile, StopWatch, Termination
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
from piper.launchers.worker_server import WorkerServer, serve
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.worker import Options

GROUP = 60.0  # seconds that a cluster may take to find resources for all actors
END = 10.0  # seconds that cleaning up after a failure may take
LOOK = 2.0  # seconds between two looks at all workers while they do not answer
STOPPED = 3.0  # seconds for which a worker must be seen stopped to count as lost
REMOVER = """
import os, shutil, signal, sys, time
from pathlib import Path
folder, word = Path(sys.argv[1]), sys.stdin.read()
def of_ray(process):  # Ray writes new titles over command lines and environments; its logs stay open
    program = os.readlink(process / "exe")
    files = [os.readlink(file) for file in (process / "fd").iterdir()]
    ours = program == os.path.realpath(sys.executable) or "/ray/core/" in program
    return ours and any(file.startswith(f"{folder}/") for file in files)
until, absent = time.monotonic() + 60, 0
while time.monotonic() < until and absent < (1 if word else 8):
    if not word:  # the driver was killed: some processes of its Ray may still run, and write
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if of_ray(process):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
    shutil.rmtree(folder, ignore_errors=True)
    absent = 0 if folder.exists() else absent + 1
    time.sleep(0 if word else 0.5)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """The process of an actor."""

    node: str
    address: str
    process: int
    marks: SharedFile  # its progress


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

    def __init__(self, program: ProgramLike, options: Options, group: PlacementGroup, gpus: int) -> None:
        super().__init__(program, options)
        self.locations: dict[int, ActorLocation] = {}
        self.monitors: dict[str, Any] = {}  # by node
        self.working: dict[Any, int] = {}  # calls that last as long as their actors work
        self.lost: dict[int, str] = {}
        self.stops = StopWatch(STOPPED)
        self.looked = (monotonic(), dict[int, ProcessStatus]())
        self.moved: dict[int, ProcessStatus] = {}  # the statuses at the last call of `moving`
        remote, width = ray.remote(Actor), streams_of(program.plans)
        self.actors: dict[int, Any] = {}
        for i, device in enumerate(self.devices):  # they start while the driver builds the model
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
            device=device, local=0, store=store, options=self.options, setup=setup, values=index
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


def not_started(why: str) -> LaunchError:
    """Return the error of an actor that does not become a worker."""
    return LaunchError(
        "an actor did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


def reason(error: RayError) -> str:
    """Return what Ray says of the end of a process, if it knows."""
    found = re.search(r"exit type: (\w+)", str(error))
    return f" ({found[1]})" if found else ""


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
def folder_of_ray() -> Iterator[str]:
    """Make a folder that another process removes after the block, or when this process is killed."""
    folder = tempfile.mkdtemp(prefix="piper-ray-")
    words = [sys.executable, "-I", "-S", "-c", REMOVER, folder]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True) as remover:
        try:
            yield folder
        finally:
            remover.communicate("now", timeout=END)


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
    """Claim the resources of an actor for each device."""
    bundle = {"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}
    group = placement_group([dict(bundle) for _ in range(devices)], strategy="PACK")
    try:
        if not group.wait(GROUP):
            has = ray.cluster_resources()  # type: ignore[no-untyped-call]
            raise LaunchError(
                "the cluster has no room for all workers",
                by="launch",
                facts={
                    "needs": ", ".join(f"{devices * amount:g} {name}" for name, amount in bundle.items()),
                    "has": ", ".join(f"{has.get(name, 0):g} {name}" for name in bundle),
                },
                hint="wait until other jobs have ended, add nodes, or place the job on fewer devices",
            )
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
