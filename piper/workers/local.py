"""`local`: every device is a process of this machine."""

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from torch import Tensor

from piper.errors import LaunchError
from piper.runtime.accelerator import is_accelerator
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.agent import Agent, WorkerProcess
from piper.workers.driver import SocketWorkerGroup
from piper.workers.group import Starter
from piper.workers.messages import CODEC
from piper.workers.processes import gone
from piper.workers.rendezvous import LOOPBACK
from piper.workers.serve import crowded
from piper.workers.transport.channel import Channel
from piper.workers.transport.fork_server import ForkServer, no_process
from piper.workers.transport.serialize import share
from piper.workers.transport.versions import Versions


class LocalWorkerGroup(SocketWorkerGroup):
    """Workers that a fork server forks, each at the end of a pair of sockets."""

    def __init__(self, starter: "LocalStarter", options: Options, forks: ForkServer) -> None:
        devices = starter.program.plans.devices
        self.forks, self.workers = forks, {device: WorkerProcess(forks) for device in devices}
        agents = {
            device: Agent(actor=self.workers[device], node="", address=LOOPBACK, local=place)
            for device, place in zip(devices, starter.places or range(len(devices)), strict=True)
        }
        super().__init__(starter, options, agents)
        self.shares = is_accelerator(self.program.device) and crowded(len(devices))
        self.exit_notifiers = (forks,)

    def connect(self, weights: Mapping[str, Tensor], startup: ExitStack) -> None:
        memory = share(weights)
        startup.callback(os.close, memory)
        for device, worker in self.workers.items():
            here, there = socket.socketpair()
            with there:
                self.processes[device] = worker.fork(there.fileno(), memory)
            self.channels[device] = Channel(here, self.options.timeout, codec=CODEC)

    def look(self, age: float) -> None:
        self.status = {device: worker.look() for device, worker in self.workers.items() if worker.process}

    def close(self) -> None:
        super().close()
        self.forks.end([*self.processes.values()])
        self.workers, self.processes = {}, {}


class LocalStarter(Starter):
    """Starts workers as processes, from one fork server that stays warm."""

    def __init__(
        self, program: ProgramLike, versions: Versions | None = None, forks: ForkServer | None = None
    ) -> None:
        """Prepare for a program; `forks`: a fork server that others use too. None: it has its own."""
        super().__init__(program, versions)
        self.lent, self.forks = forks is not None, forks

    def start(self, options: Options) -> LocalWorkerGroup:
        """Start all workers, and the fork server too where it is lost."""
        if self.forks is not None and not self.lent and gone(self.forks.server):
            self.close()
        self.forks = self.forks or ForkServer()
        group = LocalWorkerGroup(self, options, self.forks)
        try:
            group.begin()
        except OSError as error:  # the fork server went while it was asked
            self.close()
            raise no_process(error) from error
        except LaunchError:
            self.close()
            raise
        return group

    def close(self) -> None:
        """End the fork server, if no other uses it. Idempotent."""
        if self.forks is not None and not self.lent:
            self.forks.close()
            self.forks = None
