"""The agent of one device on its machine: it outlives the device's worker, and holds what must outlive it.

An agent has a fork server with torch imported, so that a worker starts in milliseconds, and the memory of
versions, see [Note: versions]. It watches the worker, which may no longer answer. It has no torch itself, and
ends with its driver.
"""

import json
import mmap
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from piper.errors import LaunchError
from piper.plan.plan import Plans
from piper.workers.processes import (
    STREAMS,
    Place,
    ProcessStatus,
    SharedFile,
    free_memory,
    gone,
    map_marks,
    nameless_file,
    running,
    stopped,
    write_at,
)
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.fork_server import ForkServer, die_with

BLOCK = 512  # bytes in which the system counts what a file takes


class WorkerProcess:
    """The process of a device's worker: forked, looked at from outside, and ended."""

    def __init__(self, forks: ForkServer | None = None) -> None:
        """Prepare to fork; `forks`: a fork server that is started already."""
        self.forks = forks
        self.process = 0  # 0: none was started
        self.marks: memoryview | None = None

    def fork(self, way: int, values: int) -> int:
        """Fork the worker; `way`: to its driver, `values`: the file of the initial values."""
        assert self.forks is not None
        marks = nameless_file(8 * STREAMS)  # shared: it is read also when the worker is dead or stopped
        self.marks = map_marks(marks)
        try:
            self.process = self.forks.fork([way, marks, values])
        finally:
            os.close(marks)
        return self.process

    def look(self) -> ProcessStatus:
        """Return the status of the worker's process."""
        ended = self.forks.end_of(self.process) if self.process and self.forks is not None else None
        at = () if self.marks is None else running(self.marks)
        return ProcessStatus(
            process=self.process, running=at, ended=ended, stopped=ended is None and stopped(self.process)
        )

    def end(self) -> None:
        """End the worker, stopped or not. Idempotent."""
        if self.process and self.forks is not None:
            self.forks.end([self.process])
            self.process = 0


class MachineAgent(WorkerProcess):
    """Starts the worker of a device again and again, and holds its versions."""

    def __init__(self, key: bytes = b"") -> None:
        """Prepare to fork; `key`: of the job, which is not sent where the agent knows it."""
        super().__init__()
        self.key = key
        self.values: int | None = None  # the file of the initial values, for all workers of this machine
        self.owner = ""  # the versions whose memory this is
        self.memory: dict[int, list[int]] = {}  # a file for each generation, by device

    def warm(self) -> None:
        """Start the fork server, and again if it is lost. Wait until it has imported torch."""
        if self.forks is not None and gone(self.forks.server):
            self.forks.close()
            self.forks = None
        self.forks = self.forks or ForkServer()
        self.forks.warm()

    def hold(self, values: bytes) -> SharedFile:
        """Hold the initial values. Return where all workers of this machine find them."""
        self.release()
        self.values = nameless_file(0)
        write_at(self.values, 0, values)  # on Ray it is an array, whose bytes are not copied on the way
        return SharedFile.of(self.values)

    def start(self, device: int, driver: tuple[str, int], key: bytes, values: SharedFile) -> int:
        """Fork the worker of a device, which connects to its driver. Return its process id."""
        self.end()
        self.warm()
        ticket, values_file = nameless_file(0), values.open()
        os.pwrite(ticket, json.dumps((*driver, (self.key or key).hex(), device)).encode(), 0)
        try:
            return self.fork(ticket, values_file)
        finally:
            os.close(ticket)
            os.close(values_file)

    def release(self) -> None:
        """Give back the memory of the initial values, which all workers have opened."""
        if self.values is not None:
            os.close(self.values)
            self.values = None

    def room(self) -> int | None:
        """Return the bytes of shared memory that are free. None: it has no bound of its own."""
        return free_memory()

    def held(self, owner: str) -> int:
        """Return the bytes of versions that are held for another owner, which `keep` gives back."""
        files = [file for files in self.memory.values() for file in files] if owner != self.owner else []
        return sum(os.fstat(file).st_blocks * BLOCK for file in files)

    def keep(self, owner: str, devices: Iterable[int], count: int) -> dict[int, tuple[SharedFile, ...]]:
        """Hold `count` files for each of these devices, and no others. Return where workers find them."""
        wanted = [*devices]
        for device in [*self.memory]:
            if owner != self.owner or device not in wanted:
                for file in self.memory.pop(device):
                    os.close(file)
        self.owner = owner
        for device in wanted:
            self.memory.setdefault(device, [])
            while len(self.memory[device]) < count:
                self.memory[device].append(nameless_file(0))
        return {device: tuple(map(SharedFile.of, self.memory[device])) for device in wanted}

    def heads(self, asked: Sequence[Place], nbytes: int) -> list[bytes]:
        """Return the bytes at some places, fewer where a file is shorter."""
        return [os.pread(self.memory[d][g], nbytes, at) for d, g, at in asked]

    def image(self, place: Place, nbytes: int) -> bytes:
        """Return a copy of the bytes that begin at a place."""
        device, generation, at = place
        with mmap.mmap(self.memory[device][generation], nbytes, offset=at) as memory:
            return memory[:]

    def take(self, place: Place, image: bytes, head: int) -> None:
        """Write bytes of another agent to a place, the first `head` bytes last: they mark it as complete."""
        device, generation, at = place
        file = self.memory[device][generation]
        os.posix_fallocate(file, at, len(image))  # memory that is missing is an error here
        with mmap.mmap(file, len(image), offset=at) as memory:
            memory[head:] = memoryview(image)[head:]
            memory[:head] = image[:head]

    def erase(self, places: Sequence[Place], nbytes: int) -> None:
        """Write zeros to some places."""
        for device, generation, at in places:
            os.pwrite(self.memory[device][generation], bytes(nbytes), at)

    def shrink(self, devices: Iterable[int]) -> None:
        """Give back the memory of what other agents hold too."""
        for file in (file for device in devices for file in self.memory[device]):
            os.ftruncate(file, 0)

    def close(self) -> None:
        """End the worker and the fork server, and give the memory back."""
        self.end()
        if self.forks is not None:
            self.forks.close()
            self.forks = None
        self.release()
        self.keep("", (), 0)


class AgentProcess(MachineAgent):
    """An agent in a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        die_with(os.getppid())  # a stopped agent would outlive what has started it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a machine that is preempted: the driver saves first


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent, and where it runs."""

    actor: Any  # `actor.look.remote()` begins a call of a `MachineAgent`. Another one may take it as argument
    node: str
    address: str
    local: int = 0  # the number of its accelerator, where it sees those of other agents too


class AgentCalls(ABC):
    """Waits for calls of agents."""

    lost: tuple[type[Exception], ...]  # what the answer of a lost agent raises
    crowded = False  # workers have to share accelerators

    @property
    @abstractmethod
    def own(self) -> str:
        """Return the address of the driver's machine."""

    @abstractmethod
    def get(self, call: Any, timeout: float = TIMEOUTS.meeting) -> Any:  # noqa: ANN401  calls have no type in common
        """Return the answer to a call."""

    @abstractmethod
    def wait(self, calls: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Wait until all calls have ended, at most `timeout` seconds. Return those, and the others."""

    @abstractmethod
    def put(self, value: bytes) -> Any:  # noqa: ANN401
        """Return a value as an argument of several calls."""

    @abstractmethod
    def keys(self) -> tuple[bytes, bytes]:
        """Return the key that workers prove to know, and what agents are sent for it."""

    def answers(self, calls: Mapping[int, Any], timeout: float = TIMEOUTS.agent_answers) -> dict[int, object]:
        """Return what calls return, without those whose agent is lost or does not answer in time."""
        self.wait([*calls.values()], timeout)
        answers: dict[int, object] = {}
        for name, call in calls.items():
            with suppress(*self.lost):
                answers[name] = self.get(call, TIMEOUTS.agent_poll_soon)
        return answers

    def finished(self, calls: Sequence[Any], timeout: float = 0.0) -> bool:
        """Return whether all of these calls have ended. A call that was lost has ended too."""
        return not self.wait(calls, timeout)[1]


def not_started(why: str) -> LaunchError:
    """Return the error of a worker that does not start."""
    return LaunchError(
        "a worker did not start",
        by="launch",
        facts={"why": why},
        hint="every node needs the same Python, torch and piper, and a way to the driver",
    )


def no_room(
    devices: int, bundle: Mapping[str, float], has: Mapping[str, float], machines: tuple[int, int] | None
) -> LaunchError:
    """Return the error of a cluster that is too small; `has`: its resources.

    machines: how many nodes are needed for copies that are apart, and how many there are. None: any number.
    """
    if machines is not None and machines[0] > machines[1]:
        each = ", ".join(f"{amount:g} {name} each" for name, amount in bundle.items())
        needs = f"{machines[0]} machines, spares included, with {each}"
        return LaunchError(
            "the cluster has too few machines to keep copies of the state apart",
            by="launch",
            facts={"needs": needs, "has": f"{machines[1]} with that room"},
            hint='add machines, or keep copies on other devices: protect(at(), copies=1, apart="device")',
        )
    return LaunchError(
        "the cluster has no room for all workers",
        by="launch",
        facts={
            "needs": ", ".join(f"{devices * amount:g} {name}" for name, amount in bundle.items()),
            "has": ", ".join(f"{has.get(name, 0):g} {name}" for name in bundle),
        },
        hint="wait until other jobs have ended, add nodes, or place the job on fewer devices",
    )


def machines_of(plans: Plans, width: int | None = None) -> tuple[list[tuple[int, ...]], bool]:
    """Return the devices of each machine, and whether copies of the state need them on different machines.

    width: for how many devices each machine has workers. None: for as many as it is given.
    """
    asked, devices = plans.protection, plans.devices
    if asked is None or not asked.copies or asked.apart == "device":  # any devices can share a machine
        each = width or 1
        return [tuple(devices[n : n + each]) for n in range(0, len(devices), each)], False
    machines = [*asked.domains(devices).values()]
    most = max(map(len, machines))
    if width is not None and most > width:
        raise LaunchError(
            "machines have too few workers for this number of devices",
            by="launch",
            facts={
                "needs": f"{most} devices on a machine, for {sum(map(len, machines))} devices",
                "has": f"{width}, as the strategy of the most devices says",
            },
            hint="let protect have the same devices_per_machine for every number of devices",
        )
    return machines, True
