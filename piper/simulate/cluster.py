"""The machines that a step is simulated on: devices, their speed and memory, and the links between them.

A cluster is a small TOML file; those in `clusters/` are known by name.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from math import ceil, inf, lcm, log2
from pathlib import Path
from typing import Any

from piper.errors import ConfigError, file_errors
from piper.ir.devices import Devices
from piper.ir.numbers import is_number
from piper.plan.ops import OPS, Op

MAY_BE_ZERO = (
    *("devices", "cores", "latency", "slows", "processors", "launch", "kernel", "issue"),
    *("context", "communicator", "fragmentation", "host_memory"),
)
PARTS = ("fragmentation", "slows")  # less than 1: they say how much of something is taken
FP8 = "float8_e4m3fn"
REQUIRED = frozenset(("memory", "memory_bandwidth", "flops", "link"))
NUMBERS = (int, float, float | None)  # types of the fields that a file gives


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of the network: what a device can send over it, and how long a message takes to arrive."""

    name: str
    bandwidth: float  # bytes per second, of one device, each way
    latency: float  # seconds
    devices: int = 0  # neighbours that it joins: 8 in a node, 256 in a rail; 0: all there are
    slows: float = 0.0  # the part of a device's speed that a communication over it takes from computing
    cores: float = 0.0  # of those that devices share, which a communication occupies for each of its members


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A kind of machine, many times. Logical devices fill it in order: 0 to 7 are the first node of eight."""

    name: str
    links: tuple[Link, ...]  # from the innermost level to the outermost
    flops: Mapping[str, float]  # peak, by torch's name of the type
    memory: float  # bytes of one device
    memory_bandwidth: float  # bytes per second
    host_bandwidth: float | None = None  # bytes per second to the host's memory. None: they are the same
    attained: float = 1.0  # the part of the arithmetic peak that large products reach
    attained_attention: float | None = None  # that attention reaches. None: as products
    attained_memory: float | None = None  # of the memory bandwidth, by large kernels. None: as products
    processors: int = 0  # of a device, over which a product is divided in tiles; 0: products divide evenly
    launch: float = 0.0  # seconds before an instruction does anything
    kernel: float = 0.0  # seconds that a kernel takes to start, on the device
    issue: float = 0.0  # seconds that the host takes for each kernel: a phase is never shorter
    devices: int = 8  # in a node
    cores: int = 0  # that the devices of a node share; 0: each has its own
    context: float = 0.0  # bytes of a device that the driver and libraries take
    communicator: float = 0.0  # bytes for each communicator that a device is part of
    fragmentation: float = 0.0  # the part of the rest that the allocator cannot use
    host_memory: float | None = None  # bytes of a node's host. None: they are not known

    @property
    def period(self) -> int:
        """Return after how many devices the network repeats itself."""
        return lcm(*(link.devices for link in self.links if link.devices))

    def usable(self, communicators: int) -> float:
        """Return the bytes of a device's memory that are left for a plan with this many communicators."""
        left = self.memory - self.context - communicators * self.communicator
        return max(0.0, left * (1 - self.fragmentation))

    def host_seconds(self, op: Op, nbytes: float) -> float | None:
        """Return how long a copy between a device and its host takes. None: their memory is the same."""
        if self.host_bandwidth is None and not self.cores and op in ("offload", "fetch"):
            raise ConfigError(
                f"the devices of {self.name} have no memory of a host to offload to",
                by="--cluster",
                facts={"missing": "host_bandwidth"},
                hint="give host_bandwidth in its file, in bytes per second, or leave offload out",
            )
        return None if self.host_bandwidth is None else nbytes / self.host_bandwidth

    def seconds(self, op: Op, nbytes: float, devices: Devices) -> float:
        """Return how long one communication takes within a group that has its links to itself.

        nbytes: the bytes each member sends, as in `Instr.nbytes`: a ring's factor of (n - 1) / n is included.
        """
        return self.latency(op, devices) + nbytes / self.bandwidth(op, devices)

    def latency(self, op: Op, devices: Devices) -> float:
        """Return the part of a communication's time that does not depend on its size."""
        size = len(devices)
        if size < 2:
            return 0.0
        ring = 2 * (size - 1) if OPS[op].pattern == "ring twice" else size - 1
        once = OPS[op].direct or OPS[op].pattern == "neighbour"
        rounds = 1 if once else min(ring, 2 * ceil(log2(size)))  # small messages take a tree
        return rounds * self.links[self.level(devices)].latency

    def bandwidth(self, op: Op, devices: Devices) -> float:
        """Return the bytes per second at which each member sends: those of the slowest level the group spans.

        A ring over several nodes uses all their network adapters at once, so with n members in each node it
        crosses between nodes n times faster. Of an all-to-all only the share for other nodes crosses. Of a
        shift all that the last member in a node sends does, through one adapter.
        """
        size = len(devices)
        slowest, inside = inf, 1  # `inside`: members that are together one level below
        for number in range(self.level(devices) + 1):
            reach = self.links[number].devices
            together = size if not reach else ceil(size / len({device // reach for device in devices}))
            if together > inside:
                crossing = (size - inside) / (size - 1) if OPS[op].direct else 1 / inside
                if OPS[op].pattern == "neighbour":
                    crossing = 1.0
                slowest = min(slowest, self.links[number].bandwidth / crossing)
            inside = together
        return slowest

    def level(self, devices: Devices) -> int:
        """Return the number of the innermost level that joins all these devices."""
        for number, link in enumerate(self.links):
            if not link.devices or len({device // link.devices for device in devices}) == 1:
                return number
        return len(self.links) - 1

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a device for a type; a type that is not listed counts as float32.

        The types of fp8 run at one speed. A GPU without it cannot run them; a CPU emulates them in float32.
        """
        if dtype.startswith("float8"):
            dtype = FP8
            if dtype not in self.flops and not self.cores:
                raise ConfigError(
                    f"the devices of {self.name} have no products in fp8",
                    by="--cluster",
                    facts={"flops": ", ".join(self.flops)},
                    hint=f"leave precision out of the strategy, or give {FP8} in [flops] of its file",
                )
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())


def known_clusters() -> list[str]:
    """Return the names of the clusters that come with the package."""
    folder = files("piper.simulate") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if ".toml" in entry.name)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load a cluster by its name, or from a TOML file of the user's."""
    spec = str(name_or_path)
    known = spec in known_clusters()
    path = files("piper.simulate") / "clusters" / f"{spec}.toml" if known else Path(spec)
    if not path.is_file():
        raise ConfigError(
            f"there is no cluster {spec!r}",
            by="--cluster",
            facts={"known": ", ".join(known_clusters())},
            hint="name one of these, or a TOML file; `piper profile --cluster-out FILE` writes one",
        )
    hint = "`piper profile --cluster-out FILE` writes one to start from; memory in bytes, times in seconds"
    with file_errors("this file describes no cluster", spec, hint, ValueError):
        return read_cluster(path.read_text(encoding="utf-8"), path.name.removesuffix(".toml"))


def read_cluster(text: str, name: str) -> Cluster:
    """Read a cluster from the text of its file."""
    found = tomllib.loads(text)
    if missing := sorted(REQUIRED - found.keys()):
        raise ValueError(f"{missing[0]!r} is missing")
    table, links = found.pop("flops"), found.pop("link")
    if not isinstance(table, dict) or not table:
        raise ValueError("'flops' is not a table of peaks by type")
    if not isinstance(links, list) or not links:
        raise ValueError("'link' is not a list of tables")
    return Cluster(
        name=name,
        links=read_links(links),
        flops={dtype: number(f"flops.{dtype}", peak) for dtype, peak in table.items()},
        **numbers_of(Cluster, found, "nothing"),
    )


def read_links(links: list[object]) -> tuple[Link, ...]:
    """Read the levels of a cluster's network. Each must join more devices than the one before."""
    made: list[Link] = []
    for place, entry in enumerate(links):
        where = f"link[{place}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError(f"{where} has no name")
        level = {**entry}
        name = level.pop("name")
        for key in ("bandwidth", "latency"):
            if key not in level:
                raise ValueError(f"{where} ({name}) has no {key!r}")
        link = Link(name=name, **numbers_of(Link, level, f"nothing of {where} ({name})", f"{where}."))
        if made and (not made[-1].devices or 0 < link.devices <= made[-1].devices):
            raise ValueError(f"{where} ({name}) joins no more devices than {made[-1].name}")
        made.append(link)
    return tuple(made)


def numbers_of(record: type, found: Mapping[str, object], nothing: str, prefix: str = "") -> dict[str, Any]:
    """Return the numbers of a table as the fields of a record have them. nothing: begins the error's text."""
    types = {field.name: field.type for field in fields(record)}
    if unknown := sorted(key for key in found if types.get(key) not in NUMBERS):
        raise ValueError(f"{nothing} is called {unknown[0]!r}")
    values = {key: number(prefix + key, value) for key, value in found.items()}
    return {key: int(value) if types[key] is int else value for key, value in values.items()}


def number(key: str, value: object) -> float:
    """Return a value of a cluster's file as a float, or refuse it."""
    if not (is_number(value) and value >= 0) or (not value and not key.endswith(MAY_BE_ZERO)):
        raise ValueError(f"{key} is {value!r}, not a positive number")
    found = float(value)
    if key.endswith(PARTS) and found >= 1:
        raise ValueError(f"{key} is {found:g}, which leaves nothing")
    return found
