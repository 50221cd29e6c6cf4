"""`ray`: every device is an actor of a Ray cluster, on one node or many."""

import logging
import os
import re
import secrets
import shutil
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
from piper.launchers.blame import Sighting
from piper.launchers.crew import CrewRun, devices_of, unread_values
from piper.launchers.freight import pack_setup
from piper.launchers.look import Look, look_at, sweep
from piper.launchers.member import Member, serve
from piper.launchers.messages import CODEC, PATIENCE, Meeting, Order
from piper.launchers.shared import Bytes, Entry, HeldValues, Marks, joined, layout
from piper.launchers.store import LOOPBACK, store_on
from piper.launchers.transport.channel import Listener, connect
from piper.launchers.watch import failure_of
from piper.launchers.wired import WiredCrew
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.worker import Options

GROUP = 60.0  # seconds that a cluster may take to find room for all actors
LEAVE = 1.0  # seconds that an actor may take to say goodbye; one that is at work is killed
END = 10.0  # seconds that cleaning up after a failure may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where an actor runs."""

    node: str
    address: str
    process: int
    marks: str  # the file that holds where it is in its plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a worker reports to its driver, and what it shows to be let in."""

    host: str
    port: int
    key: bytes


class Actor:
    """A worker as Ray runs it."""

    def __init__(self, width: int) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="piper-marks-")
        os.truncate(descriptor, Marks.size(1, width))
        self.cells = Marks(descriptor, [0], width).of(0)
        os.close(descriptor)

    def home(self) -> Home:
        """Where this actor runs."""
        return Home(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            process=os.getpid(),
            marks=self.path,
        )

    def host(self, address: str) -> int:
        """Keep the store at which all workers meet; its port."""
        self.store = store_on(address)
        return self.store.port

    def work(self, order: bytes, index: Mapping[str, Entry], memory: Bytes, door: Door) -> None:
        """Be the worker of a device until the driver is gone.

        Its calls come over a socket: one through Ray takes milliseconds, as long as many a step.
        """
        given = cast(Order, CODEC.decode(order))
        channel = connect((door.host, door.port), door.key, given.device, PATIENCE, CODEC)
        try:
            member = Member(given, HeldValues(memory, index), self.cells)
        except Exception as error:  # noqa: BLE001  it is told to the driver, which raises
            channel.send(failure_of(given.device, error))
            return
        channel.send(None)
        serve(member, channel)

    def leave(self) -> None:
        """Remove what would outlive this actor."""
        os.unlink(self.path)


class RayCrew(WiredCrew):
    """Workers that are actors."""

    grace = 3.0  # Ray takes its time to tell of a death

    def __init__(self, program: ProgramLike, options: Options) -> None:
        super().__init__(program, options)
        self.actors: dict[int, Any] = {}
        self.homes: dict[int, Home] = {}
        self.working: dict[Any, int] = {}  # calls that last as long as their actors work
        self.lost: dict[int, str] = {}
        self.looked = (monotonic(), dict[int, Sighting]())

    def start(self, group: PlacementGroup, gpus: int) -> CrewRun:
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
        self.homes = self._homes()
        addresses = {home.address for home in self.homes.values()}
        own = {d: LOOPBACK if len(addresses) == 1 else home.address for d, home in self.homes.items()}
        first = devices[0]
        port = ray.get(self.actors[first].host.remote(own[first]), timeout=PATIENCE)
        key = secrets.token_bytes(32)
        with Listener(self._address(addresses), key, self.options.timeout, CODEC) as listener:
            until = monotonic() + PATIENCE
            host, port_here = listener.address
            door = Door(host=host, port=port_here, key=key)
            for device in devices:
                meeting = Meeting(host=own[first], port=port, address=own[device])
                order = Order(device=device, local=0, meeting=meeting, options=self.options, setup=setup)
                self.working[self.actors[device].work.remote(CODEC.encode(order), index, memory, door)] = (
                    device
                )
            while len(self.channels) < len(devices):
                self._let_in(listener, until)
        self.gather(set(devices), max(PATIENCE, self.options.timeout))
        return CrewRun(program, self, unread_values(program, values))

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

    def _homes(self) -> dict[int, Home]:
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
        when, before = self.looked
        if monotonic() - when < self.options.timeout / 2:
            return False  # a look is a task on every node
        self.looked = (monotonic(), self.sightings())
        return bool(before) and before != self.looked[1]

    def sightings(self) -> dict[int, Sighting]:
        """What is seen of every device, from a task on its own node: an actor may be past answering."""
        ended = self.ended()
        asked = {
            node: look_on(node).remote({d: (h.process, h.marks) for d, h in homes.items()})
            for node, homes in self._by_node().items()
        }
        found: dict[int, Sighting] = {}
        for node, ref in asked.items():
            try:
                looks = ray.get(ref, timeout=END)
            except (RayError, GetTimeoutError):
                looks = {}  # the node is gone too
            for device, home in self._by_node()[node].items():
                look = looks.get(device, Look())
                found[device] = Sighting(
                    process=home.process,
                    running=look.running,
                    ended=ended.get(device),
                    stopped=look.stopped,
                )
        return {device: found[device] for device in self.devices}

    def _by_node(self) -> dict[str, dict[int, Home]]:
        nodes: dict[str, dict[int, Home]] = {}
        for device, home in self.homes.items():
            nodes.setdefault(home.node, {})[device] = home
        return nodes

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        leaving = {actor.leave.remote(): device for device, actor in self.actors.items()}
        left, _ = ray.wait(list(leaving), num_returns=len(leaving), timeout=LEAVE) if leaving else ([], [])
        gone = {leaving[ref] for ref in left} - set(self.lost)
        for actor in self.actors.values():
            ray.kill(actor)
        rest = {
            node: [(home.process, home.marks) for device, home in homes.items() if device not in gone]
            for node, homes in self._by_node().items()
        }
        swept = [sweep_on(node).remote(workers) for node, workers in rest.items() if workers]
        if swept:
            ray.wait(swept, num_returns=len(swept), timeout=END)
        self.actors.clear()
        self.homes.clear()


def not_started(why: str) -> LaunchError:
    """The error of an actor that does not become a worker."""
    return LaunchError(
        "an actor did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


def look_on(node: str) -> Any:  # noqa: ANN401  Ray has no types for it
    """A task that looks at workers of its node."""
    return ray.remote(look_at).options(num_cpus=0, scheduling_strategy=on_node(node), max_retries=0)


def sweep_on(node: str) -> Any:  # noqa: ANN401  Ray has no types for it
    """A task that ends what is left of workers of its node."""
    return ray.remote(sweep).options(num_cpus=0, scheduling_strategy=on_node(node), max_retries=0)


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """On this node or nowhere."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


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
            folder = tempfile.mkdtemp(prefix="piper-ray-")
            held.callback(shutil.rmtree, folder, ignore_errors=True)
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
def launch_ray(program: ProgramLike, options: Options | None = None) -> Iterator[CrewRun]:
    """Start a program on actors of Ray, and end them with the block.

    A Ray that is initialised already is used, with all its nodes; otherwise one is started, which listens on
    this machine only, and is stopped again.
    """
    devices = len(devices_of(program.plans))
    gpus = int(setup_of(program).device.type == "cuda")
    with cluster(devices), room(devices, gpus) as group, ExitStack() as held:
        crew = RayCrew(program, options or Options())
        held.callback(crew.close)
        run = crew.start(group, gpus)
        held.callback(run.close)
        yield run
