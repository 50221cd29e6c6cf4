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
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from piper.errors import LaunchError
from piper.launchers.base import streams_of
from piper.launchers.driver import RemoteRun, devices_of, unread_values
from piper.launchers.failures import ProcessStatus
from piper.launchers.freight import pack_setup
from piper.launchers.messages import CODEC, PATIENCE, Assignment, StoreAddress
from piper.launchers.processes import Look, NodeMonitor, SharedFile
from piper.launchers.store import LOOPBACK, store_on
from piper.launchers.transport.channel import Listener, connect
from piper.launchers.transport.fork_server import StopWatch, die_with
from piper.launchers.transport.shared_memory import (
    Bytes,
    HeldValues,
    ProgressMarks,
    TensorEntry,
    joined,
    layout,
    nameless_file,
)
from piper.launchers.watch import failure_of
from piper.launchers.wired import SocketWorkerGroup
from piper.launchers.worker_server import WorkerServer, serve
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.worker import Options

GROUP = 60.0  # seconds that a cluster may take to find room for all actors
END = 10.0  # seconds that cleaning up after a failure may take
LOOK = 2.0  # seconds between two looks at all workers while they do not answer
STOPPED = 3.0  # seconds for which a worker must be seen stopped to count as lost
REMOVER = """
import shutil, sys, time
from pathlib import Path
folder, word = Path(sys.argv[1]), sys.stdin.read()
until, absent = time.monotonic() + 60, 0
while time.monotonic() < until and absent < (1 if word else 8):  # Ray may write on when its driver was killed
    shutil.rmtree(folder, ignore_errors=True)
    absent = 0 if folder.exists() else absent + 1
    time.sleep(0 if word else 0.5)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """Where an actor runs."""

    node: str
    address: str
    process: int
    marks: SharedFile  # the file that holds where it is in its plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverAddress:
    """Where a worker reports to its driver, and what it shows to be let in."""

    host: str
    port: int
    key: bytes


class Actor:
    """A worker as Ray runs it."""

    def __init__(self, width: int) -> None:
        die_with(os.getppid())  # a stopped actor would outlive its raylet
        self.marks = nameless_file(ProgressMarks.size(1, width))
        self.cells = ProgressMarks(self.marks, [0], width).of(0)

    def home(self) -> ActorLocation:
        """Where this actor runs."""
        return ActorLocation(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            process=os.getpid(),
            marks=SharedFile.of(self.marks),
        )

    def host(self, address: str) -> int:
        """Keep the store at which all workers meet; its port."""
        self.store = store_on(address)
        return self.store.port

    def work(
        self, order: bytes, index: Mapping[str, TensorEntry], memory: Bytes, door: DriverAddress
    ) -> None:
        """Be the worker of a device until the driver is gone.

        Its calls come over a socket: one through Ray takes milliseconds, as long as many a step.
        """
        given = cast(Assignment, CODEC.decode(order))
        channel = connect((door.host, door.port), door.key, given.device, PATIENCE, CODEC)
        try:
            member = WorkerServer(given, HeldValues(memory, index), self.cells)
        except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
            channel.send(failure_of(given.device, error))
            return
        channel.send(None)
        serve(member, channel)


class RayWorkerGroup(SocketWorkerGroup):
    """Workers that are actors."""

    grace = 3.0  # Ray takes its time to tell of a death

    def __init__(self, program: ProgramLike, options: Options) -> None:
        super().__init__(program, options)
        self.actors: dict[int, Any] = {}
        self.locations: dict[int, ActorLocation] = {}
        self.working: dict[Any, int] = {}  # calls that last as long as their actors work
        self.lost: dict[int, str] = {}
        self.monitors: dict[str, Any] = {}  # by node
        self.stops = StopWatch(STOPPED)
        self.looked = (monotonic(), dict[int, ProcessStatus]())
        self.moved: dict[
            int, ProcessStatus
        ] = {}  # what was seen when it was last asked whether anything moves

    def start(self, group: PlacementGroup, gpus: int) -> RemoteRun:
        """Start every actor and wait until all have met."""
        program, devices = self.program, self.devices
        width = streams_of(program.plans)
        remote = ray.remote(Actor)
        for i, device in enumerate(devices):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            self.actors[device] = remote.options(
                num_cpus=1, num_gpus=gpus, scheduling_strategy=place, max_restarts=0
            ).remote(width)
        values = {} if self.options.blank else initial_tensors(program.job)
        index = layout(values)
        memory = ray.put(joined(values, index).numpy())
        setup = pack_setup(setup_of(program))
        self.locations = self._locations()
        watching = self._watch()
        addresses = {home.address for home in self.locations.values()}
        own = {d: LOOPBACK if len(addresses) == 1 else home.address for d, home in self.locations.items()}
        first = devices[0]
        port = ray.get(self.actors[first].host.remote(own[first]), timeout=PATIENCE)
        key = secrets.token_bytes(32)
        with Listener(self._address(addresses), key, self.options.timeout, CODEC) as listener:
            until = monotonic() + PATIENCE
            host, port_here = listener.address
            door = DriverAddress(host=host, port=port_here, key=key)
            for device in devices:
                meeting = StoreAddress(host=own[first], port=port, address=own[device])
                order = Assignment(device=device, local=0, meeting=meeting, options=self.options, setup=setup)
                self.working[self.actors[device].work.remote(CODEC.encode(order), index, memory, door)] = (
                    device
                )
            while len(self.channels) < len(devices):
                self._let_in(listener, until)
        self.gather(set(devices), max(PATIENCE, self.options.timeout))
        try:
            ray.get(watching, timeout=PATIENCE)
        except (RayError, GetTimeoutError) as error:
            raise not_started(str(error).splitlines()[0]) from error
        return RemoteRun(program, self, unread_values(program, values))

    def _address(self, addresses: set[str]) -> str:
        """Where this driver can be reached by all actors."""
        mine: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return LOOPBACK if addresses == {mine} else mine

    def _let_in(self, listener: Listener, until: float) -> None:
        arrived = listener.accept(1.0)
        if arrived is not None:
            device, self.channels[device] = arrived
        elif lost := self.ended():
            raise not_started(next(iter(lost.values())))
        elif monotonic() > until:
            raise not_started("it cannot reach the driver")

    def _watch(self) -> list[Any]:
        """Start a monitor on every node. Return the calls that have ended when all of them watch."""
        calls = []
        for node, locations in self._by_node().items():
            place = NodeAffinitySchedulingStrategy(node, soft=False)  # on this node or nowhere
            self.monitors[node] = (
                ray.remote(NodeMonitor)
                .options(num_cpus=0, scheduling_strategy=place, max_restarts=0)
                .remote()
            )
            workers = {device: (home.process, home.marks) for device, home in locations.items()}
            calls.append(self.monitors[node].hold.remote(workers))
        return calls

    def _locations(self) -> dict[int, ActorLocation]:
        asked = [actor.home.remote() for actor in self.actors.values()]
        try:
            return dict(zip(self.actors, ray.get(asked, timeout=PATIENCE), strict=True))
        except (RayError, GetTimeoutError) as error:
            raise not_started(str(error).splitlines()[0]) from error

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
        before, self.moved = self.moved, self._looked()
        return bool(before) and before != self.moved

    def stopped(self) -> set[int]:
        return {d for d, seen in self._looked().items() if self.stops.lasting(seen.process, seen.stopped)}

    def _looked(self) -> dict[int, ProcessStatus]:
        """Return what was seen of every device within the last seconds."""
        when, seen = self.looked
        if monotonic() - max(when, self.asked) > LOOK:  # it costs a call to every node
            seen = self.statuses()
            self.looked = (monotonic(), seen)
        return seen

    def statuses(self) -> dict[int, ProcessStatus]:
        """What is seen of every device, by the monitor of its node: an actor may be past answering."""
        ended = self.ended()
        asked = {node: monitor.look.remote() for node, monitor in self.monitors.items()}
        found: dict[int, ProcessStatus] = {}
        for node, ref in asked.items():
            try:
                looks = ray.get(ref, timeout=END)
            except (RayError, GetTimeoutError):
                looks = {}  # the node is gone too
            for device, home in self._by_node()[node].items():
                look = looks.get(device, Look())
                found[device] = ProcessStatus(
                    process=home.process,
                    running=look.running,
                    ended=ended.get(device),
                    stopped=look.stopped,
                )
        return {device: found[device] for device in self.devices}

    def _by_node(self) -> dict[str, dict[int, ActorLocation]]:
        nodes: dict[str, dict[int, ActorLocation]] = {}
        for device, home in self.locations.items():
            nodes.setdefault(home.node, {})[device] = home
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
        self.actors.clear()
        self.locations.clear()
        self.monitors.clear()


def not_started(why: str) -> LaunchError:
    """The error of an actor that does not become a worker."""
    return LaunchError(
        "an actor did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


def reason(error: RayError) -> str:
    """What Ray says of the end of a process, if it knows."""
    found = re.search(r"exit type: (\w+)", str(error))
    return f" ({found[1]})" if found else ""


@contextmanager
def cluster(devices: int) -> Iterator[None]:
    """A Ray that is there already, or one of our own on this machine that ends with the block."""
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
def room(devices: int, gpus: int) -> Iterator[PlacementGroup]:
    """Room for an actor for each device."""
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

    A Ray that is initialised already is used, with all its nodes; otherwise one is started, which listens on
    this machine only, and is stopped again.
    """
    devices = len(devices_of(program.plans))
    gpus = int(setup_of(program).device.type == "cuda")
    with cluster(devices), room(devices, gpus) as group, ExitStack() as held:
        crew = RayWorkerGroup(program, options or Options())
        held.callback(crew.close)
        run = crew.start(group, gpus)
        held.callback(run.close)
        yield run
