"""What a local worker of a job takes of its machine."""

import os
import subprocess
from pathlib import Path

import pytest

from piper.compiler import compile
from piper.run.launch import launch_local
from piper.workers.driver import SocketWorkerGroup
from piper.workers.transport import fork_server
from tests.runtime.grid import Cell, batches, job

# Pipeline, experts, ZeRO and clipping on four devices: every kind of communicator.
CELL = Cell(case="moe", schedule="dualpipe-v", dp=2, zero=3, ways=2, rows=1, parts=4, clip=0.5)
THREADS, SOCKETS = 14, 10


def sockets(process: int) -> list[str]:
    opened = Path(f"/proc/{process}/fd")
    return [name for name in os.listdir(opened) if os.readlink(opened / name).startswith("socket:")]


def test_a_worker_of_four_devices_has_few_threads_and_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "subprocess", subprocess)  # a warm fork server has a socket of the tests
    with launch_local(compile(job(CELL))) as run:
        for batch in batches(CELL, 2):
            run.step(batch)
        assert isinstance(run.session.group, SocketWorkerGroup) and len(run.session.group.processes) == 4
        for process in run.session.group.processes.values():
            assert 1 < len(os.listdir(f"/proc/{process}/task")) <= THREADS
            assert 1 < len(sockets(process)) <= SOCKETS
