"""`local`: every device is a process of this machine."""

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from torch import Tensor

from piper.errors import LaunchError
from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.driver import SocketWorkerGroup
from piper.workers.group import Readable
from piper.workers.messages import CODEC, Assignment, StoreAddress
from piper.workers.processes import SharedFile, gone, how
from piper.workers.rendezvous import LOOPBACK, store_on
from piper.workers.serve import crowded
from piper.workers.starter import Starter
from piper.workers.timeouts import TIMEOUTS
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.nameless_files import map_marks, new_marks
from piper.workers.transport.shared_memory import TensorEntry, share
from piper.workers.transport.versions import Versions


class LocalWorkerGroup(SocketWorkerGroup):
    """Workers that a fork server forks, each at the end of a pair of sockets."""

    def __init__(
        self,
        program: ProgramLike,
        options: Options,
        forks: ForkServer,
        versions: Mapping[int, tuple[SharedFile, ...]] | None = None,
    ) -> None:
        super().__init__(program, options)
        self.forks, self.versions, self.protects = forks, versions, versions is not None
        self.places: Sequence[int] | None = None  # the accelerator of each device. None: in their order
        self.shares = is_accelerator(program.device) and crowded(len(self.devices))

    def connect(
        self, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry], width: int, startup: ExitStack
    ) -> None:
        self.store = store_on(LOOPBACK)
        memory = share(weights, index)
        startup.callback(os.close, memory)
        for device in self.devices:
            marks = new_marks(width)
            self.marks[device] = map_marks(marks)
            here, there = socket.socketpair()
            with there:
                self.processes[device] = self.forks.fork([there.fileno(), marks, memory])
            os.close(marks)
            self.channels[device] = Channel(here, self.options.timeout, codec=CODEC)

    def assignment(
        self, device: int, setup: bytes, weights: Mapping[str, Tensor], index: Mapping[str, TensorEntry]
    ) -> Assignment:
        place = self.devices.index(device)
        return Assignment(
            device=device,
            local=place if self.places is None else self.places[place],
            store=StoreAddress(host=LOOPBACK, port=self.store.port, own=LOOPBACK),
            options=self.options,
            setup=setup,
            shares=self.shares,
            values=index,
            path=tuple(sys.path),
            versions=self.versions,
        )

    def exit_notifiers(self) -> Sequence[Readable]:
        return (self.forks,)

    def ended(self) -> dict[int, str]:
        ends = self.forks.ended()
        ended = {d: f"the process {how(ends[pid])}" for d, pid in self.processes.items() if pid in ends}
        # The fork server may be slow, stopped or gone.
        for device in (self.silent & self.processes.keys()) - ended.keys():
            if (end := self.forks.end_of(self.processes[device])) is not None:
                ended[device] = end
        return ended

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        ended = self.forks.ended()
        left = [pid for pid in self.processes.values() if pid not in ended]
        for pid in left:
            with suppress(ProcessLookupError):  # it has ended since the fork server was asked
                os.kill(pid, signal.SIGKILL)
        self.forks.wait(left, TIMEOUTS.process_end)
        self.channels.clear()
        self.processes.clear()


class LocalStarter(Starter):
    """Starts workers as processes, from one fork server that stays warm."""

    def __init__(
        self, program: ProgramLike, versions: Versions | None = None, forks: ForkServer | None = None
    ) -> None:
        """Prepare for a program; `forks`: a fork server that others use too. None: it has its own."""
        super().__init__(program, versions)
        self.lent, self.forks = forks is not None, forks
        self.places: Sequence[int] | None = None
        self.packed: bytes | None = None

    def start(self, options: Options) -> LocalWorkerGroup:
        """Start all workers, and the fork server too where it is lost."""
        if self.forks is not None and not self.lent and gone(self.forks.server):
            self.close()
        self.forks = self.forks or ForkServer()
        files = None if self.versions is None else self.versions.files
        group = LocalWorkerGroup(self.program, options, self.forks, files)
        group.packed, group.places = self.packed, self.places
        try:
            group.begin()
        except OSError as error:  # the fork server went while it was asked
            self.close()
            raise LaunchError(
                "no process can be started",
                by="launch",
                facts={"why": f"{type(error).__name__}: {error}"},
                hint="look at what the process printed; is the machine out of memory or processes?",
            ) from error
        except LaunchError:
            self.close()
            raise
        self.packed = group.packed
        return group

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        super().use(program, versions, places)
        self.places, self.packed = places, getattr(program, "packed", None)  # of one that came as bytes

    def close(self) -> None:
        """End the fork server, if no other uses it. Idempotent."""
        if self.forks is not None and not self.lent:
            self.forks.close()
            self.forks = None
