"""`protect`: the plan copies the state; killed workers and lost machines go on from the copies, to the bit."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from piper.checkpoint.json_state import decode
from piper.compiler import Program, compile
from piper.directives import protect
from piper.errors import ConfigError
from piper.ir.select import at
from piper.plan.protected import survival
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run import Run
from piper.run.run_events import Event
from piper.runtime.worker import Options
from piper.workers.results import StepResult
from piper.workers.transport.version_sections import SPAN, held_in, step_in
from piper.workers.transport.versions import Versions, version_bytes
from tests.runtime.grid import Cell, batches, job, strategy

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
SHARDED = Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3)
BUFFERS = Cell(case="convnet", schedule="none", dp=2, zero=0)
FROZEN = Cell(case="frozen", schedule="none", dp=2, zero=2)
EXPERTS = Cell(case="moe", schedule="none", dp=2, zero=3, ways=2, rows=1)
GROUPS = Cell(case="mlp", schedule="none", dp=4, zero=3, within=2, parts=1)


class Deadly(torch.optim.lr_scheduler.LinearLR):
    """Kills the process that is asked for its state first, once a file is there: a protect instruction asks."""

    def __init__(self, optimizer: torch.optim.Optimizer, flag: str) -> None:
        super().__init__(optimizer, start_factor=0.1, total_iters=10)
        self.flag = Path(flag)

    def state_dict(self) -> dict[str, object]:
        try:
            self.flag.unlink()
        except FileNotFoundError:
            return {k: v for k, v in super().state_dict().items() if k != "flag"}
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def protected(cell: Cell, copies: int = 0, **changes: object) -> Program:
    asked = protect(at(), copies=copies, apart="device" if copies else "machine")
    return compile(job(cell, **{"strategy": [*strategy(cell), asked], **changes}))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("cell", "copies"),
    [
        (PAIR, 1),
        *(
            pytest.param(cell, n, marks=pytest.mark.slow)
            for cell in (SHARDED, BUFFERS, EXPERTS, GROUPS)
            for n in (0, 1)
        ),
    ],
    ids=str,
)
def test_a_process_killed_at_a_protect_instruction(cell: Cell, copies: int, tmp_path: Path) -> None:
    flag = tmp_path / "now"
    program = protected(cell, copies, scheduler=partial(Deadly, flag=str(flag)))
    given = batches(cell, 5)
    with launch_inline(program) as whole:
        wanted = [whole.step(batch) for batch in given]
        state = whole.state_dict()
    events: list[Event] = []
    got: list[StepResult] = []
    with recovering(program, "local", Options(), retries=3, notify=events.append) as run:
        for number, batch in enumerate(given):
            if number in (0, 3):
                flag.touch()
            got.append(run.step(batch))
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    assert got == wanted
    assert [(e.event, e.step) for e in events] == [
        ("failure", 1), ("recovery", 1), ("failure", 4), ("recovery", 4),
    ]  # fmt: skip
    assert all(str(e.instruction).find("protect[") > 0 for e in events if e.event == "failure"), events
    # The version of step 3 was not completed, unless a replica has made a second copy of what is missing.
    found = (events[-1].version, events[-1].replayed)
    assert found == (2, 1) or (cell in (BUFFERS, GROUPS) and copies and found == (3, 0)), found


@pytest.fixture(scope="module")
def buffered() -> Program:
    """Replicas with buffers, and master weights in addition to the parameters."""
    return protected(BUFFERS, copies=1, precision="bf16")


@pytest.fixture
def versions(buffered: Program) -> Iterator[Versions]:
    made = Versions(buffered.plans)
    yield made
    made.close()


@pytest.fixture(scope="module")
def frozen() -> Program:
    return protected(FROZEN, copies=1)


def trained(program: Program, versions: Versions, steps: int, cell: Cell = BUFFERS) -> Run:
    run = launch_inline(program, Options(), versions.files)
    run.session.protect()
    for batch in batches(cell, steps):
        run.step(batch)
    return run


@pytest.mark.parametrize("device", [0, 1])
def test_what_one_device_loses_another_holds(buffered: Program, versions: Versions, device: int) -> None:
    """The memory of a device is gone. The others hold every element."""
    run = trained(buffered, versions, 3)
    wanted, unread = run.step(batches(BUFFERS, 4)[3]), dict(run.session.unread)
    state = run.state_dict()
    run.close()
    assert versions.newest() == 3 and versions.whole
    for descriptor in versions.descriptors[device]:
        os.ftruncate(descriptor, 0)
    assert versions.newest() == 3 and versions.whole, "a step writes every value"
    again = launch_inline(buffered, Options(blank=True), versions.files)
    again.session.restore(3, unread)
    assert again.step(batches(BUFFERS, 4)[3]) == wanted
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    again.close()


@pytest.mark.parametrize("lost", [(0, 1), (6, 7)])
def test_a_lost_machine_finds_its_shards_in_the_memory_of_another_group(lost: tuple[int, int]) -> None:
    """Each group of ZeRO is a machine, and the other one holds the same shards: nothing has to be sent."""
    asked = protect(at(), copies=1, apart="machine", devices_per_machine=2)
    program = compile(job(GROUPS, strategy=[*strategy(GROUPS), asked]))
    report = survival(program.plans)
    assert report is not None and report.losable == (0, 1, 2, 3)
    assert not any(ins.op == "mirror" for plan in program.plans for ins in plan.instrs)
    versions = Versions(program.plans)
    run = trained(program, versions, 3, GROUPS)
    wanted, unread, state = run.step(batches(GROUPS, 4)[3]), dict(run.session.unread), run.state_dict()
    run.close()
    for device in lost:
        for descriptor in versions.descriptors[device]:
            os.ftruncate(descriptor, 0)
    assert versions.newest() == 3 and versions.whole
    again = launch_inline(program, Options(blank=True), versions.files)
    again.session.restore(3, unread)
    assert again.step(batches(GROUPS, 4)[3]) == wanted
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    again.close()
    versions.close()


def test_what_no_step_writes_is_made_again(frozen: Program) -> None:
    """Frozen parameters are copied once, for the device that saves them. Where it is lost, so are they."""
    versions = Versions(frozen.plans)
    run = trained(frozen, versions, 2, FROZEN)
    wanted, unread, state = run.step(batches(FROZEN, 3)[2]), dict(run.session.unread), run.state_dict()
    run.close()
    lost = versions.holders.resting[0]
    for descriptor in versions.descriptors[lost]:
        os.ftruncate(descriptor, 0)
    assert versions.newest() == 2 and not versions.whole
    again = launch_inline(frozen, Options(), versions.files)
    again.session.protect()
    assert versions.whole
    again.session.restore(2, unread)
    assert again.step(batches(FROZEN, 3)[2]) == wanted
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    again.close()
    versions.close()


def test_a_version_is_of_the_state_that_a_step_begins_with(buffered: Program, versions: Versions) -> None:
    run = trained(buffered, versions, 2)
    run.close()
    assert versions.newest() == 1
    torn = versions.holders.of(versions.descriptors, 1)
    assert torn is not None
    for device in (0, 1):  # a worker was killed while it copied: the other copy is left, then none
        for descriptor in versions.descriptors[device]:
            if step_in(descriptor, 1) == 1:
                os.pwrite(descriptor, bytes(8), SPAN)
        assert versions.newest() == (1 if device == 0 else 0)
    versions.forget(lambda step: True)
    assert versions.newest() is None


def test_a_version_has_the_options_that_were_loaded(
    buffered: Program, versions: Versions, tmp_path: Path
) -> None:
    """The state that was loaded is of the step that was copied last, with another learning rate."""
    with launch_inline(buffered) as other:
        other.optimizer[0]["lr"] = 0.25
        other.save(tmp_path / "saved")
    with trained(buffered, versions, 1) as run:
        run.load(tmp_path / "saved")
        versions.forget(lambda step: True)
        run.session.protect()
        run.step(batches(BUFFERS, 1)[0])
    groups = cast("list[dict[str, object]]", decode(versions.saved(0, 0)[0].trainer.groups))
    assert groups[0]["lr"] == 0.25


def sections_bytes(versions: Versions) -> int:
    """Return the bytes of a version: without counters of steps, which are a part of the index."""
    held = 0
    for section in versions.holders.sections:
        descriptor = next(d for d in versions.descriptors[section.holder] if step_in(d, section.number) == 1)
        found = held_in(descriptor, section.number)
        held += sum(
            found.part(number).nbytes
            for number, placed in enumerate(found.layout.placed)
            if not placed.key.endswith(".step")
        )
    return held


def held_bytes(program: Program, given: list[dict[str, Tensor]]) -> int:
    """Return the bytes that a version of a job takes in memory, after two steps."""
    made = Versions(program.plans)
    run = launch_inline(program, Options(), made.files)
    run.session.protect()
    for batch in given:
        run.step(batch)
    run.close()
    found = sections_bytes(made)
    made.close()
    return found


def test_host_bytes_are_those_of_the_plan(buffered: Program, versions: Versions) -> None:
    """Parameters, moments and buffers that steps write."""
    trained(buffered, versions, 2).close()
    report = survival(buffered.plans)
    assert report is not None and report.host_bytes == (2 * sections_bytes(versions),)
    assert sum(os.fstat(d).st_blocks * 512 for pair in versions.descriptors.values() for d in pair) <= sum(
        version_bytes(versions.holders).values()
    )


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        (PAIR, 16320),  # 340 elements of 8 bytes, with two moments, twice
        *(
            pytest.param(cell, wanted, marks=pytest.mark.slow)
            for cell, wanted in ((BUFFERS, 42256), (SHARDED, 1881600), (EXPERTS, 1704960))
        ),
    ],
    ids=str,
)
def test_host_bytes_in_double_precision(cell: Cell, wanted: int) -> None:
    program = protected(cell)
    report = survival(program.plans)
    assert report is not None and report.host_bytes == (wanted,)
    assert 2 * held_bytes(program, batches(cell, 2)) == wanted


def test_too_little_memory(buffered: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    with pytest.raises(ConfigError) as caught:
        Versions(buffered.plans)
    assert str(caught.value).splitlines()[0] == (
        "--retries, on /dev/shm: there is too little shared memory to keep versions of the state in"
    )
    assert "protect: copies=1" in str(caught.value)


def test_a_version_every_other_step(buffered: Program) -> None:
    """A failure repeats at most two steps: the batches since the version are held."""
    asked = buffered.plans.protection
    assert asked is not None
    program = replace(buffered, plans=replace(buffered.plans, protection=replace(asked, every=2)))
    made = Versions(program.plans)
    run = launch_inline(program, Options(), made.files)
    run.session.protect()
    found = []
    for batch in batches(BUFFERS, 5):
        run.step(batch)
        found.append(made.newest())
    run.close()
    assert found == [0, 0, 2, 2, 4]
    made.forget(lambda step: step > 2)
    again = launch_inline(program, Options(blank=True), made.files)
    again.session.restore(2, {})
    again.step(batches(BUFFERS, 3)[2])
    assert made.newest() == 2  # the step after a version begins to count again
    again.close()
    made.close()
