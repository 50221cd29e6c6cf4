"""Several ranks on one GPU that use NCCL, as tests start them.

NCCL takes processes with different names of their host for several machines, and connects them by sockets. With
PIPER_RANKS_DEVICE=cpu the same tests run on hosts over gloo, to try them where there is no GPU.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from piper.run.launch import launch_local
from piper.run.recovery import Recovery
from piper.run.run import Run, start_run
from piper.run.run_events import Event, Notify
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.local import LocalStarter, LocalWorkerGroup
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.versions import Versions
from tests.gpu.rank_process import CORES, TRAP

DEVICE = os.environ.get("PIPER_RANKS_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
MARKS = [pytest.mark.gpu] if ON_GPU else []
NETWORK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    # Kernels of many ranks and tests wait on one GPU at once: each takes as little of it as it can.
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MAX_P2P_NCHANNELS": "1",
    # Without these NCCL failed with "out of memory" under MPS, with 0.8 GiB of the GPU in use: each client took
    # 32 hardware queues over all multiprocessors.
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


@contextmanager
def rank_forks(
    clients: Mapping[str, str], module: str = "tests.gpu.rank_process", trap: Path | None = None
) -> Iterator[ForkServer]:
    """Yield a fork server whose processes are ranks; `clients`: the environment of clients of MPS."""
    cores = ",".join(map(str, range(os.cpu_count() or 1)))
    asked = {**NETWORK, **clients, CORES: cores, **({} if trap is None else {TRAP: str(trap)})}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in asked.items():
            environment.setenv(name, value)
        forks = ForkServer(module)
    try:
        forks.warm()
        yield forks
    finally:
        forks.close()


def by_nccl(options: Options) -> Options:
    """Return options with which devices that share a GPU use NCCL."""
    return replace(options, share="nccl")


def launch_ranks(program: ProgramLike, options: Options, forks: ForkServer) -> Run:
    """Start a program on ranks."""
    return launch_local(program, by_nccl(options), forks)


def recovering_ranks(
    program: ProgramLike, forks: ForkServer, notify: Notify, *, stall: float | None = None
) -> Run:
    """Start a program on ranks that are replaced when they are lost.

    On hosts without streams: there a device would be at several instructions, and a failure could name any of them.
    """
    with ExitStack() as ends:
        versions = Versions(program.plans)
        ends.callback(versions.close)
        starter, options = LocalStarter(program, versions, forks), by_nccl(Options(streams=ON_GPU))
        sessions = Recovery(program, options, starter, versions, retries=10**6, stall=stall, notify=notify)
        ends.pop_all()
    return start_run(sessions)


def pids_of(run: Run) -> dict[int, int]:
    """Return the processes of a run by device."""
    group = run.session.group
    assert isinstance(group, LocalWorkerGroup)
    return dict(group.processes)


def told(events: list[Event]) -> str:
    """Return what happened to the ranks of a run, a line each."""
    return "\n".join(
        f"step {e.step} {e.event} {e.who}: {e.what}; {e.instruction}; {e.seconds} s {dict(e.phases)}"
        for e in events
    )
