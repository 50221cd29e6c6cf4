"""Versions in memory: complete or absent, each element once, and read back to the last bit."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import cleandoc
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from piper.compiler import Program, compile
from piper.errors import ConfigError
from piper.run.launch import launch_inline
from piper.run.run import Run
from piper.runtime.worker import Options, Worker
from piper.workers.serve import WorkerAnswers
from piper.workers.transport.version_sections import HEAD, held_in, step_in
from piper.workers.transport.versions import Versions, WorkerVersions, check_memory, version_bytes
from tests.runtime.grid import Cell, batches, job

CELLS = [
    Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3),
    Cell(case="convnet", schedule="none", dp=2, zero=0),
    Cell(case="moe", schedule="none", dp=2, zero=3, ways=2, rows=1),
]


@pytest.fixture(scope="module", params=CELLS, ids=str)
def program(request: pytest.FixtureRequest) -> Program:
    return compile(job(request.param))


@pytest.fixture
def versions(program: Program) -> Iterator[Versions]:
    made = Versions(program.plans)
    yield made
    made.close()


def trained(program: Program, versions: Versions, steps: int, cell: Cell) -> Run:
    run = launch_inline(program, Options(), versions.files)
    run.session.protect()
    for batch in batches(cell, steps):
        run.step(batch)
    return run


def test_a_version_holds_everything_once_and_is_restored_to_the_bit(
    request: pytest.FixtureRequest, program: Program, versions: Versions
) -> None:
    cell = request.node.callspec.params["program"]
    assert versions.newest() is None
    run = trained(program, versions, 3, cell)
    assert versions.newest() == 3
    sizes: dict[str, int] = {}
    for parts in versions.saved(3, 0)[1].values():
        for part in parts:
            sizes[part.key] = sizes.get(part.key, 0) + part.tensor.numel()
    for name, value in run.state_dict().items():
        if (key := f"model.{name}") in sizes:  # tied names are held under one of them
            assert sizes[key] == value.numel(), key
    held = sum(os.fstat(d).st_size for pair in versions.descriptors.values() for d in pair)
    assert held <= sum(version_bytes(versions.holders).values())
    batch = batches(cell, 4)[3]
    wanted = run.step(batch)
    state = run.state_dict()
    unread = dict(run.session.unread)
    run.close()
    versions.forget(lambda step: step == 4)
    again = launch_inline(program, Options(blank=True), versions.files)
    again.session.restore(3, unread)
    assert again.step(batch) == wanted
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    again.close()


def test_a_version_is_complete_or_absent(
    request: pytest.FixtureRequest, program: Program, versions: Versions
) -> None:
    run = trained(program, versions, 2, request.node.callspec.params["program"])
    run.close()
    assert versions.newest() == 2
    first = versions.devices[0]
    torn = versions.descriptors[first][0]
    assert held_in(torn).copied.step == 2
    os.pwrite(torn, HEAD.pack(0, 10, 10, 0, 0), 0)  # a worker was killed while it copied step 2
    assert step_in(torn) is None and versions.newest() == 1
    versions.forget(lambda step: True)
    assert versions.newest() is None


def test_a_failed_step_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would overwrite the only version that a device which was killed before its copy has too."""
    written: list[str] = []
    monkeypatch.setattr("piper.workers.serve.move_state", lambda worker, number: None)
    kept = SimpleNamespace(holders=SimpleNamespace(state=None), write=lambda: written.append("version"))
    for lost in (False, True):
        worker = SimpleNamespace(step=lambda batch, number, lost=lost: 1 / (not lost))
        answers = WorkerAnswers(cast(Worker, worker), cast(WorkerVersions, kept))
        with pytest.raises(ZeroDivisionError) if lost else nullcontext():
            answers.step((0, {}))
    assert written == ["version"]


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    check_memory(16 * 4096)
    with pytest.raises(ConfigError) as caught:
        check_memory(3 * 2**20)
    assert str(caught.value) == cleandoc("""
        --retries, on /dev/shm: there is too little shared memory to keep versions of the state in
          needs: 3.0 MiB: two versions of what each device owns
          has:   64.0 KiB
          hint:  enlarge it (mount -o remount,size=... /dev/shm), or train without: --retries 0
    """)
