"""Steps that are run again because rows exceed their blocks: how often is told, and a worker may end in one."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run_events import Event, Repeats
from piper.runtime.worker import Options, Sums, Worker
from tests.runtime import moving
from tests.runtime.test_expert_blocks import MICROBATCHES, Mixture, batches, blocks, program
from tests.workers import sabotage


def test_steps_that_are_often_run_again_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    given = batches(13)
    with launch_inline(moving.program(blocks(1), model=Mixture, data=batches)) as run:
        repeated = [run.step(batch).repeated for batch in given]
    assert all(repeated)
    (line,) = (record.getMessage() for record in caplog.records if "exceeded" in record.getMessage())
    said = "Rows exceeded their blocks in 11 of the last 11 steps, which ran twice: blocks have room for capacity=1, "
    assert line.startswith(f"{said}and these steps need capacity=")
    enough = float(line.rpartition("=")[2])
    for capacity, fits in ((enough, True), (enough - 0.2, False)):
        with launch_inline(moving.program(blocks(capacity), model=Mixture, data=batches)) as run:
            assert fits != any(run.step(batch).repeated for batch in given[:11])


def test_steps_before_a_recovery_are_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    compiled, passes = moving.program(blocks(1), model=Mixture, data=batches), list[int]()
    name = next(chunk.name for chunk in compiled.outline.chunks if chunk.kind == "expert")

    def fail_once() -> None:
        passes.append(1)
        if len(passes) == 60:  # two devices run twice in each step: in the fifteenth
            sabotage.fail()

    trapped, events = sabotage.Sabotaged(program=compiled, arg=f"B {name}", act=fail_once), list[Event]()
    with recovering(trapped, "inline", Options(streams=False), retries=1, notify=events.append) as run:
        assert all(run.step(batch).repeated for batch in batches(28))
    assert [event.event for event in events] == ["failure", "recovery"]
    assert len([record for record in caplog.records if "exceeded" in record.getMessage()]) == 1


def test_few_steps_that_are_run_again_are_not_told() -> None:
    repeats, rerun = Repeats(), Sums(numbers={}, repeated=True, fullest=(2.345, 1.5))
    usual = Sums(numbers={})
    lines = [repeats.note([usual, rerun if step % 5 == 0 else usual]) for step in range(200)]
    assert not any(lines)
    lines = [repeats.note([usual, rerun if step % 4 == 0 else usual]) for step in range(200)]
    assert [line for line in lines if line is not None] == [
        "Rows exceeded their blocks in 11 of the last 50 steps, which ran twice: "
        "blocks have room for capacity=1.5, and these steps need capacity=2.35"
    ]


@dataclass(frozen=True)
class EndOnce:
    """Ends a worker, or fails, where a step is run again, unless a file says that one has."""

    path: Path
    end: Callable[[], None]

    def __call__(self) -> None:
        callers = (each.frame.f_locals.get("self") for each in inspect.stack(0))
        worker = next(caller for caller in callers if isinstance(caller, Worker))  # it is in this thread
        if worker.env.exact and not self.path.exists():
            self.path.touch()
            self.end()


@pytest.mark.parametrize("on", ["inline", "local"])
def test_a_worker_that_ends_while_a_step_is_run_again(on: Literal["inline", "local"], tmp_path: Path) -> None:
    compiled, given, events = program([*blocks(2, zero=1), MICROBATCHES]), batches(4), list[Event]()
    with launch_inline(compiled) as run:
        wanted, state = [run.step(batch) for batch in given], run.state_dict()
    step = next(number for number, result in enumerate(wanted, 1) if result.repeated)
    act = EndOnce(tmp_path / "ended", sabotage.fail if on == "inline" else sabotage.die)
    # Workers of processes share the code of equal chunks: that of the last one.
    name = [chunk.name for chunk in compiled.outline.chunks if chunk.kind == "expert"][-1]
    trapped = sabotage.Sabotaged(program=compiled, arg=f"B {name}", act=act)
    with recovering(trapped, on, Options(streams=False), retries=1, notify=events.append) as run:
        assert [run.step(batch) for batch in given] == wanted
        again = run.state_dict()
    assert [(event.event, event.step) for event in events] == [("failure", step), ("recovery", step)]
    assert all(torch.equal(again[name], value) for name, value in state.items())
