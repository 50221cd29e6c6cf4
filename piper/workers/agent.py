"""The agent of one device on its machine: it outlives the device's worker, and holds what must outlive it.

An agent has a fork server with torch imported, so that a worker starts in milliseconds, and the memory of
versions, see [Note: versions]. It watches the worker, which may no longer answer. It has no torch itself, and
ends with its driver.
"""

import json
import mmap
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from piper.workers.processes import (
    Place,
    ProcessStatus,
    SharedFile,
    free_memory,
    gone,
    map_marks,
    nameless_file,
    running,
    stopped,
)
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.fork_server import ForkServer, die_with

BLOCK = 512  # bytes in which the system counts what a file takes
Bytes = npt.NDArray[np.uint8]


class WorkerProcess:
    """The process of a device's worker: forked, looked at from outside, and ended."""

    def __init__(self, forks: ForkServer | None = None) -> None:
        """Prepare to fork; `forks`: a fork server that is started already."""
        self.forks = forks
        self.process = 0  # 0: none was started
        self.marks: memoryview | None = None

    def fork(self, way: int, values: int, width: int) -> int:
        """Fork the worker; `way`: to its driver, `values`: the file of the initial values."""
        assert self.forks is not None
        marks = nameless_file(8 * width)  # shared: it is read also when the worker is dead or stopped
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
            self.kill()
            self.forks.wait([self.process], TIMEOUTS.process_end)
            self.process = 0

    def kill(self) -> None:
        """End the worker, stopped or not, without waiting for it."""
        assert self.forks is not None
        if self.process and self.process not in self.forks.ended():
            with suppress(ProcessLookupError):  # it has ended since the fork server was asked
                os.kill(self.process, signal.SIGKILL)


class MachineAgent(WorkerProcess):
    """Starts the worker of a device again and again, and holds its versions."""

    def __init__(self) -> None:
        super().__init__()
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

    def hold(self, values: Bytes) -> SharedFile:
        """Hold the initial values. Return where all workers of this machine find them."""
        if self.values is not None:
            os.close(self.values)
        self.values = nameless_file(len(values))
        if len(values):
            os.posix_fallocate(self.values, 0, len(values))
            with mmap.mmap(self.values, len(values)) as memory:
                memory[:] = values.data
        return SharedFile.of(self.values)

    def start(self, device: int, driver: tuple[str, int], key: bytes, width: int, values: SharedFile) -> int:
        """Fork the worker of a device, which connects to its driver. Return its process id."""
        self.end()
        self.warm()
        ticket, values_file = nameless_file(0), values.open()
        assert values_file is not None, "it is held on this machine"
        os.ftruncate(ticket, 0)
        os.pwrite(ticket, json.dumps((*driver, key.hex(), device)).encode(), 0)
        try:
            return self.fork(ticket, values_file, width)
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

    def image(self, place: Place, nbytes: int) -> Bytes:
        """Return a copy of the bytes that begin at a place."""
        device, generation, at = place
        with mmap.mmap(self.memory[device][generation], nbytes, offset=at) as memory:
            return np.frombuffer(memory[:], dtype=np.uint8)

    def take(self, place: Place, image: Bytes, head: int) -> None:
        """Write bytes of another agent to a place, the first `head` bytes last: they mark it as complete."""
        device, generation, at = place
        file = self.memory[device][generation]
        os.posix_fallocate(file, at, len(image))  # memory that is missing is an error here
        with mmap.mmap(file, len(image), offset=at) as memory:
            memory[head:] = image[head:].data
            memory[:head] = image[:head].data

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
        self.release()
        for file in (file for files in self.memory.values() for file in files):
            os.close(file)
        self.forks, self.memory = None, {}


class AgentProcess(MachineAgent):
    """An agent in a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        die_with(os.getppid())  # a stopped agent would outlive what has started it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a machine that is preempted: the driver saves first
