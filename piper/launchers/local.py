"""`local`: every device is a process of this machine."""

import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from piper.launchers.accelerator import crowded
from piper.launchers.base import streams_of
from piper.launchers.driver import RemoteRun, unread_values
from piper.launchers.failures import ProcessStatus
from piper.launchers.freight import pack_setup
from piper.launchers.messages import CODEC, PATIENCE, Assignment, SharedState, StoreAddress
from piper.launchers.processes import gone, running, stopped
from piper.launchers.store import LOOPBACK, store_on
from piper.launchers.transport.channel import Channel
from piper.launchers.transport.fork_server import ForkServer, StopWatch
from piper.launchers.transport.fork_server import fork_server as started_fork_server
from piper.launchers.transport.shared_memory import ProgressMarks, layout, nameless_file, share
from piper.launchers.wired import Readable, SocketWorkerGroup
from piper.runtime.setup import ProgramLike, initial_tensors, setup_of
from piper.runtime.worker import Options

END = 10.0  # seconds that a killed process may take to end


class LocalWorkerGroup(SocketWorkerGroup):
    """Workers that a fork_server forks, each at the end of a socket."""

    def __init__(self, program: ProgramLike, options: Options, fork_server: ForkServer) -> None:
        super().__init__(program, options)
        self.fork_server = fork_server
        self.pids: dict[int, int] = {}
        self.stops = StopWatch()
        self.seen = b""

    def start(self) -> RemoteRun:
        """Start every worker and wait until all have met."""
        program, devices = self.program, self.devices
        width = streams_of(program.plans)
        values = {} if self.options.blank else initial_tensors(program.job)
        index = layout(values)
        store = store_on(LOOPBACK)
        meeting = StoreAddress(host=LOOPBACK, port=store.port, address=LOOPBACK)
        setup = pack_setup(setup_of(program))
        shares = program.device == "cuda" and crowded(len(devices))
        places = SharedState(values=index, devices=tuple(devices), width=width, path=tuple(sys.path))
        with ExitStack() as held:
            marks = nameless_file(ProgressMarks.size(len(devices), width))
            held.callback(os.close, marks)
            memory = share(values, index)
            held.callback(os.close, memory)
            self.marks = ProgressMarks(marks, devices, width)
            for device in devices:
                here, there = socket.socketpair()
                with there:
                    self.pids[device] = self.fork_server.fork([there.fileno(), marks, memory])
                self.channels[device] = Channel(here, self.options.timeout, codec=CODEC)
            for local, device in enumerate(devices):
                order = Assignment(
                    device=device,
                    local=local,
                    meeting=meeting,
                    options=self.options,
                    setup=setup,
                    shares=shares,
                )
                self.send(device, (places, order))
        self.gather(set(devices), max(PATIENCE, self.options.timeout))
        return RemoteRun(program, self, unread_values(program, values))

    def bells(self) -> Sequence[Readable]:
        return (self.fork_server,)

    def ended(self) -> dict[int, str]:
        ends = self.fork_server.ended()
        found = {d: f"the process {how(ends[pid])}" for d, pid in self.pids.items() if pid in ends}
        for device in self.silent - found.keys():  # the fork_server may be stopped or gone
            if device in self.pids and gone(self.pids[device]):
                found[device] = "the process has ended"
        return found

    def stopped(self) -> set[int]:
        return {device for device, pid in self.pids.items() if self.stops.lasting(pid, stopped(pid))}

    def statuses(self) -> dict[int, ProcessStatus]:
        ended = self.ended()
        return {
            device: ProcessStatus(
                process=pid,
                running=running(self.marks.of(device)),
                ended=ended.get(device),
                stopped=device not in ended and stopped(pid),
            )
            for device, pid in self.pids.items()
        }

    def moving(self) -> bool:
        before, self.seen = self.seen, bytes(self.marks.cells)
        return before != self.seen

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        ended = self.fork_server.ended()
        left = [pid for pid in self.pids.values() if pid not in ended]
        for pid in left:
            with suppress(
                ProcessLookupError
            ):  # it ended since the fork_server was asked, which is what we want
                os.kill(pid, signal.SIGKILL)
        self.fork_server.wait(left, END)
        self.channels.clear()
        self.pids.clear()


def how(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with exit code {status}"
    return f"was killed by {signal.Signals(-status).name}"


@contextmanager
def launch_local(
    program: ProgramLike, options: Options | None = None, fork_server: ForkServer | None = None
) -> Iterator[RemoteRun]:
    """Start a program on processes of this machine, and end them with the block.

    `fork_server`: forks the workers, where several launches share one; else the launch has its own.
    """
    with ExitStack() as held:
        forks = fork_server or held.enter_context(started_fork_server())
        crew = LocalWorkerGroup(program, options or Options(), forks)
        held.callback(crew.close)
        run = crew.start()
        held.callback(run.close)
        yield run
