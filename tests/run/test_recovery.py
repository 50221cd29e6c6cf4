"""Recovery: every failure takes one path, and what comes out are the bits of an undisturbed run."""

import os
import random
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from piper.callbacks import Callback, Running
from piper.checkpoint.folder import begin, verify
from piper.checkpoint.json_state import decode
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.target import UnwrittenError
from piper.compiler import Program, compile
from piper.errors import ConfigError, LaunchError, WorkerError
from piper.plan.plan import Plans
from piper.run.driver_checkpoints import write_version
from piper.run.elastic import MOVED
from piper.run.launch import launch_inline
from piper.run.recovery import Recovery, recovering
from piper.run.run import Run
from piper.run.run_events import Event, Stragglers
from piper.run.session import Session
from piper.runtime.batch import FLOATING, BatchSpec
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.train.run_folder import described
from piper.workers.agent_versions import ShortMachine
from piper.workers.group import Starter
from piper.workers.local import LocalStarter, LocalWorkerGroup
from piper.workers.results import Means, Resumed, StepResult
from piper.workers.transport.versions import Versions
from tests.run.recoveries import disk_with, recovery_of
from tests.runtime.grid import Cell, batches, job
from tests.workers import sabotage
from tests.workers.sabotage import Sabotaged

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
SHARDED = Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3)
BUFFERS = Cell(case="convnet", schedule="none", dp=2, zero=1)


@dataclass
class Script:
    """Runs that only count; the loss of a step is its number, and what fails is written down.

    fails: what each start, step or load raises, once, by what it is about.
    """

    fails: dict[str, list[Exception]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    memory: dict[int, int] = field(default_factory=dict)  # versions, by generation
    every: int = 1
    whole: bool = True
    kept: bool = True  # whether versions are written
    stalls: list[float] = field(default_factory=list)
    near: bool = True
    waited: float = 0.0  # until agents are warm, at each start
    warmed: deque[tuple[str, float]] = field(default_factory=deque)  # agents that become warm meanwhile
    passed_over: deque[ShortMachine] = field(default_factory=deque)  # spares that a start did not use
    unheard: list[int] = field(default_factory=list)  # steps that end, and whose answer is lost

    def do(self, what: str) -> None:
        self.log.append(what)
        if self.fails.get(what):
            raise self.fails[what].pop(0)

    def start(self, options: Options) -> "Counting":
        self.do("start blank" if options.blank else "start")
        return Counting(self)

    def room(self, *, warm: bool = False) -> int | None:
        return None

    def notice(self) -> None:
        """Note what `warmed` has already."""

    def use(self, program: ProgramLike, versions: Versions, places: Sequence[int]) -> None:
        raise AssertionError("no script resizes")

    def expect(self, group: object, stall: float) -> None:
        self.stalls.append(stall)

    def close(self) -> None:
        self.log.append("closed")

    def newest(self, last: int | None = None) -> int | None:
        return max((step for step in self.memory.values() if last is None or step <= last), default=None)

    def forget(self, chosen: object) -> None:
        self.log.append("forget")


@dataclass
class Counting:
    script: Script
    done: int = 0
    unread: dict[str, Tensor] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    group = SimpleNamespace(leaving=False)

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        self.script.do(f"step {self.done + 1}")
        self.done += 1
        self.protect()
        if self.done in self.script.unheard:
            self.script.unheard.remove(self.done)
            raise lost()
        return StepResult(loss=float(batch["x"]), grad_norm=1.0)

    def evaluate(self, batch: Mapping[str, Tensor], means: Means) -> Means:
        self.script.do(f"evaluate {float(batch['x']):g}")
        loss, weight = means.sums or (0.0, 0.0)
        sums = (loss + float(batch["x"]), weight + 1)
        return replace(means, sums=sums, batches=means.batches + 1)

    def protect(self) -> None:
        if self.script.kept:
            self.script.memory[self.done % 2] = self.done

    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        self.script.do(f"restore {step}")
        self.done = step

    def read(self, path: Path) -> Resumed:
        self.script.do(f"load {path}")
        self.done = 7
        return Resumed(step=7)

    def write(self, path: Path, data: object, *, wait: bool, keep: int | None) -> None:
        self.script.do(f"save {path} after {self.done}")

    def settle(self) -> None:
        if self.script.fails.get("settle"):
            raise self.script.fails["settle"].pop(0)

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        self.script.do(f"set {group} {key} {value}")

    def close(self) -> None:
        self.script.log.append("end")


class Scripted(Recovery):
    """Sessions that a script plays."""

    def open(self, options: Options) -> Session:
        return cast(Session, self.starter.start(options))


def scripted(script: Script, retries: int = 3, **more: object) -> tuple[Run, list[Event]]:
    events: list[Event] = []
    recovery = Scripted(
        cast(ProgramLike, SimpleNamespace(plans=(), job=SimpleNamespace(callbacks=(), checkpoint=None))),
        Options(),
        cast(Starter, script),
        cast(Versions, script),
        retries=retries,
        notify=events.append,
        **more,  # type: ignore[arg-type]
    )
    return Run(recovery), events


def lost(device: int = 1, place: int | None = 4, kind: str = "dead", what: str = "killed") -> WorkerError:
    error = WorkerError(what, by=f"device {device}", facts={"at": f"instruction {place}"}, hint="none")
    error.kind, error.device, error.place = kind, device, place  # type: ignore[assignment]
    return error


def batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.tensor(float(number))}


def train(run: Run, first: int, last: int) -> list[float]:
    return [run.step(batch(number)).loss for number in range(first, last + 1)]


def test_a_lost_worker_costs_one_restart_and_the_step() -> None:
    script = Script(fails={"step 3": [lost()]})
    run, events = scripted(script)
    assert train(run, 1, 4) == [1.0, 2.0, 3.0, 4.0]
    assert script.log == [
        "start", "step 1", "step 2", "step 3", "end",
        "start blank", "forget", "restore 2", "step 3", "step 4",
    ]  # fmt: skip
    assert [(e.event, e.step, e.device, e.what, e.instruction, e.left) for e in events] == [
        ("failure", 3, 1, "killed", "instruction 4", 2),
        ("recovery", 3, None, None, None, 2),
    ]
    assert (events[1].version, events[1].replayed, events[1].source) == (2, 0, "memory")
    assert [*events[1].phases] == ["end", "start", "load", "replay"]


def test_an_evaluation_goes_on_with_the_batch_that_was_lost() -> None:
    """Batches are taken once, from an iterator that cannot begin again, and each counts once."""
    script = Script(fails={"evaluate 2": [lost()]})
    run, events = scripted(script)
    train(run, 1, 1)
    result = run.evaluate({"x": value} for value in torch.tensor([[1.0], [2.0], [6.0]]))
    assert (result.loss, result.batches) == (3.0, 3)
    assert script.log == [
        "start", "step 1", "evaluate 1", "evaluate 2", "end",
        "start blank", "forget", "restore 1", "evaluate 2", "evaluate 6",
    ]  # fmt: skip
    assert [event.event for event in events] == ["failure", "recovery"]


def test_an_agent_that_becomes_warm_and_one_that_is_waited_for_are_in_the_events() -> None:
    """The first between two steps, as an event of its own; the second as a phase of the recovery."""
    script = Script(fails={"step 3": [lost()]}, waited=5.0)
    run, events = scripted(script)
    script.warmed.append(("10.0.0.3", 12.3456))
    train(run, 1, 1)
    assert events == [Event(event="warm", step=1, who="agent on 10.0.0.3", seconds=12.346)]
    assert described(events[0]) == "Step 1: the agent on 10.0.0.3 is warm after 12.3 s, as a spare"
    train(run, 2, 4)
    assert [e.event for e in events] == ["warm", "failure", "recovery"]
    assert events[2].phases["warm"] == 5.0 and events[2].phases["start"] < 0.0, "the script waits for nothing"
    shown = described(replace(events[2], seconds=7.0))
    assert shown.startswith(
        "Step 3: recovered in 7.0 s, of which 5.0 s until agents were warm, from the state"
    )


def test_a_spare_that_is_passed_over_is_in_the_events() -> None:
    """Also where the start fails: it says why."""
    script = Script(fails={"step 2": [lost()]})
    run, events = scripted(script)
    train(run, 1, 1)
    script.passed_over.append(ShortMachine(address="10.0.0.3", needs=3 * 2**20, has=2**20))
    script.fails["start blank"] = [LaunchError("too few", by="launch", hint="none")]
    assert train(run, 2, 2) == [2.0]
    assert [event.event for event in events] == ["failure", "skipped", "failure", "recovery"]
    assert described(events[1]) == (
        "Step 2: machine 10.0.0.3 is passed over: it has 1.0 MiB of shared memory, "
        "and versions of its devices need 3.0 MiB"
    )


def test_a_step_whose_answer_is_lost_is_repeated_from_the_version_before_it() -> None:
    """All workers had written the version of step 3 when one was killed, before the driver read its answer."""
    script = Script(unheard=[3])
    run, events = scripted(script)
    assert train(run, 1, 4) == [1.0, 2.0, 3.0, 4.0]
    assert script.log == [
        "start", "step 1", "step 2", "step 3", "end",
        "start blank", "forget", "restore 2", "step 3", "step 4",
    ]  # fmt: skip
    assert (events[1].version, events[1].replayed) == (2, 0)


def test_a_step_whose_answer_is_lost_is_not_in_what_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = scripted(Script(unheard=[3]), retries=0)
    with pytest.raises(WorkerError):
        train(run, 1, 3)
    written: list[int] = []
    monkeypatch.setattr("piper.run.recovery.write_version", lambda *given, **more: written.append(given[2]))
    assert run.flush(Path("none")) == 2 and written == [2]


def test_steps_since_the_version_are_repeated_and_a_failure_there_is_one_more() -> None:
    script = Script(fails={"step 3": [lost(place=1)], "restore 1": [lost(place=None)], "step 2": [lost()]})
    run, events = scripted(script)
    script.fails["step 2"] = []
    train(run, 1, 2)
    script.kept = False
    script.memory = {1: 1}  # the version of step 2 was not completed
    script.fails["step 2"] = [lost(place=2)]
    assert train(run, 3, 3) == [3.0]
    assert script.log == [
        "start", "step 1", "step 2", "step 3", "end",
        "start blank", "forget", "restore 1", "end",
        "start blank", "forget", "restore 1", "step 2", "end",
        "start blank", "forget", "restore 1", "step 2", "step 3",
    ]  # fmt: skip
    assert [(e.event, e.step, e.left) for e in events] == [
        ("failure", 3, 2), ("failure", 3, 1), ("failure", 2, 0), ("recovery", 3, 0),
    ]  # fmt: skip
    assert events[-1].replayed == 1


def test_the_same_failure_twice_is_the_end() -> None:
    first, second = lost(kind="error", what="broken"), lost(kind="error", what="broken")
    run, events = scripted(Script(fails={"step 2": [first, second]}))
    with pytest.raises(WorkerError) as caught:
        train(run, 1, 2)
    assert caught.value is second and [e.event for e in events] == ["failure", "recovery"]


def test_the_same_error_on_another_replica_is_the_same() -> None:
    """Replicas raise it at the same instruction, and which is heard first differs."""
    errors = [lost(device=device, kind="error", what="broken") for device in (0, 1)]
    run, events = scripted(Script(fails={"step 2": [*errors]}))
    with pytest.raises(WorkerError) as caught:
        train(run, 1, 2)
    assert caught.value is errors[1] and [e.event for e in events] == ["failure", "recovery"]


def test_a_straggler_is_named_after_twenty_slow_steps() -> None:
    run, events = scripted(Script())
    recovery_of(run).stragglers = Stragglers(cast(Plans, [SimpleNamespace(devices=(0, 1, 2))]))
    recovery_of(run).begin()
    run.session.busy = {0: 1.0, 1: 1.0, 2: 2.0}
    train(run, 1, 49)
    slow = "2.0 times as busy as the median of devices 0-2, and slow for 20 steps"
    assert [(e.event, e.step, e.device, e.what) for e in events] == [("straggler", 20, 2, slow)]


@pytest.mark.parametrize(
    "other",
    [
        lost(device=2), lost(place=5), lost(what="stopped"),
    ],
)  # fmt: skip
def test_another_failure_is_not_the_same(other: Exception) -> None:
    run, _ = scripted(Script(fails={"step 2": [lost(), other, lost()]}))
    assert train(run, 1, 2) == [1.0, 2.0]


def test_workers_that_cannot_be_started_again_are_a_failure_too() -> None:
    error = LaunchError("no process can be started", by="launch", hint="none")
    run, events = scripted(Script(fails={"step 2": [lost(), lost()], "start blank": [error]}))
    assert train(run, 1, 2) == [1.0, 2.0]
    assert [(e.event, e.left) for e in events] == [
        ("failure", 2), ("failure", 1), ("recovery", 1), ("failure", 0), ("recovery", 0),
    ]  # fmt: skip


def test_a_process_killed_at_no_instruction_did_not_do_it_itself() -> None:
    run, _ = scripted(Script(fails={"step 2": [lost(place=None), lost(place=None)]}))
    assert train(run, 1, 2) == [1.0, 2.0]
    broken = [lost(place=None, kind="error"), lost(place=None, kind="error")]
    run, _ = scripted(Script(fails={"step 2": [*broken]}))
    with pytest.raises(WorkerError):
        train(run, 1, 2)


def test_retries_are_used_up_and_refilled() -> None:
    script = Script(fails={"step 2": [lost(place=1), lost(place=2)]})
    run, _ = scripted(script, retries=2)
    train(run, 1, 100)
    assert recovery_of(run).left == 0
    train(run, 101, 101)
    assert recovery_of(run).left == 2
    final = lost(place=3)
    script.fails["step 102"] = [lost(place=1), lost(place=2), final]
    with pytest.raises(WorkerError) as caught:
        train(run, 102, 102)
    assert caught.value is final


def test_a_failure_before_the_first_version_begins_again() -> None:
    script = Script(fails={"load here": [lost(place=None)]}, kept=False)
    run, _ = scripted(script)
    recovery_of(run).begin()
    assert run.load("here").step == 7
    script.fails["step 8"] = [lost()]
    assert train(run, 8, 8) == [8.0]
    assert script.log == [
        "start", "load here", "end", "start", "load here", "forget", "step 8",
        "end", "start", "load here", "step 8",
    ]  # fmt: skip


def test_workers_that_never_started_are_not_started_again() -> None:
    error = LaunchError("the job cannot be sent to its workers", by="launch", hint="none")
    run, _ = scripted(Script(fails={"start": [error]}))
    with pytest.raises(LaunchError) as caught:
        recovery_of(run).begin()
    assert caught.value is error


def test_a_state_that_is_lost_is_said() -> None:
    script = Script(fails={"step 5": [lost()]}, kept=False)
    run, _ = scripted(script)
    with pytest.raises(WorkerError) as caught:
        train(run, 1, 5)
    assert str(caught.value) == cleandoc("""
        recovery, after step 4: no version of the state is complete in memory
          hint: --resume goes on from the newest checkpoint
    """)


def test_where_memory_is_lost_the_newest_checkpoint_is_taken() -> None:
    script = Script(fails={"step 9": [lost()]}, kept=False)
    disk = disk_with(
        folder=Path("run"),
        past=lambda last: [Path("saved")],
        batches=lambda found: iter([batch(n) for n in range(found.step + 1, 99)]),
    )
    run, events = scripted(script, disk=disk)
    run.load("here")
    assert train(run, 8, 10) == [8.0, 9.0, 10.0]
    assert script.log == [
        "start", "load here", "forget", "step 8", "step 9", "end",
        "start blank", "forget", "load saved", "step 8", "step 9", "step 10",
    ]  # fmt: skip
    (_, recovery) = events
    assert (recovery.version, recovery.replayed, recovery.source) == (7, 1, "saved")


def test_a_checkpoint_is_taken_only_up_to_the_step_that_is_done(tmp_path: Path) -> None:
    """The newest is damaged, and one before it is of a step that is repeated: a save of it is made again."""
    script = Script(
        fails={"step 9": [lost(place=1), lost(place=1)], "load bad": [DamagedError(Path("bad"), "bits")]}
    )
    asked: list[int] = []

    def past(last: int) -> list[Path]:
        asked.append(last)
        return [Path("bad"), Path("saved")]

    batches = [batch(n) for n in range(8, 99)]
    run, _ = scripted(
        script, disk=disk_with(folder=tmp_path, past=past, batches=lambda found: iter(batches)), retries=9
    )
    script.kept = False
    run.load("here")
    train(run, 8, 8)
    run.save(tmp_path / "step-8", wait=False)
    with pytest.raises(WorkerError) as caught:
        train(run, 9, 9)
    assert caught.value.place == 1, "the same failure of step 9, though step 8 was repeated in between"
    assert script.log[-8:] == [
        "end", "start blank", "forget", "load bad", "load saved", "step 8",
        f"save {tmp_path / 'step-8'} after 8", "step 9", "end",
    ][-8:]  # fmt: skip
    assert asked == [8]


def test_a_checkpoint_that_was_dropped_since_is_replaced_by_another() -> None:
    """What no step writes was lost with a machine, and is the same in every checkpoint of the run."""
    script = Script(fails={"step 9": [lost()]})
    run, _ = scripted(
        script, disk=disk_with(folder=Path(), past=lambda last: [Path("newer")], batches=lambda _: iter(()))
    )
    run.load("here")
    train(run, 8, 8)
    script.whole = False
    script.fails["load here"] = [ConfigError("there is no complete checkpoint here", by="load", hint="none")]
    assert train(run, 9, 9) == [9.0]
    assert script.log[-6:] == ["start", "load here", "load newer", "forget", "restore 8", "step 9"]


def test_a_save_that_cannot_be_made_again_is_an_error_of_the_save(tmp_path: Path) -> None:
    """The disk is full: training goes on, and the next call that waits for the save says so."""
    script = Script(fails={"step 3": [lost()]})
    run, _ = scripted(script)
    train(run, 1, 2)
    run.save(tmp_path / "saved", wait=False)
    script.fails[f"save {tmp_path / 'saved'} after 2"] = [UnwrittenError("full", by="save", hint="none")]
    assert train(run, 3, 3) == [3.0]
    with pytest.raises(UnwrittenError):
        run.settle()
    run.settle()
    script.fails["settle"] = [UnwrittenError("full", by="save", hint="none")]
    with pytest.raises(UnwrittenError):
        run.settle()
    assert recovery_of(run).saving is None


def test_a_loaded_run_forgets_what_was_set_before(tmp_path: Path) -> None:
    script = Script()
    run, _ = scripted(script)
    train(run, 1, 8)
    run.set_optimizer_option(0, "lr", 0.5)
    run.save(tmp_path / "saved", wait=False)
    run.load("here")
    script.fails["step 9"] = [lost()]
    train(run, 8, 9)
    assert script.log[-4:] == ["start blank", "forget", "restore 8", "step 9"]


def test_nan_is_no_other_result() -> None:
    script = Script(fails={"step 3": [lost()]})
    run, events = scripted(script)
    run.step({"x": torch.tensor(float("nan"))})
    run.step({"x": torch.tensor(float("nan"))})
    script.memory = {1: 1}
    train(run, 3, 3)
    assert [e.event for e in events] == ["failure", "recovery"] and events[1].replayed == 1


def test_a_run_that_counts_its_steps_trains_on_the_data_of_its_job() -> None:
    run, _ = scripted(Script())
    job = SimpleNamespace(
        data=lambda: [{"x": torch.full((1,), float(n))} for n in range(1, 9)],
        evaluate=None,
        checkpoint=None,
        callbacks=(),
        seed=0,
        steps=9,
    )
    run.sessions.program = cast(ProgramLike, SimpleNamespace(plans=(), job=job))
    run.wanted = BatchSpec(shapes={"x": (1,)}, types={"x": FLOATING})
    assert [result.loss for result in run.train(3)] == [1.0, 2.0, 3.0] and run.done == 3


class Counter(Callback):
    """Counts the steps that it has seen."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, run: Running, step: int, result: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}


def test_what_is_flushed_holds_complete_steps_only(programs: dict[str, Program], tmp_path: Path) -> None:
    """The evaluation after step 3 takes too long. Step 2 is saved: its callbacks, position and options."""
    counter = Counter()
    program = replace(programs[str(PAIR)], job=replace(programs[str(PAIR)].job, callbacks=(counter,)))
    first, second, third = batches(PAIR, 3)
    with recovering(program, "inline", Options(), retries=1) as run:
        for number, given in enumerate((first, second, third), start=1):
            result = run.step(given)
            counter.on_step(run, number, result)
            if number == 2:
                run.set_optimizer_option(0, "lr", 0.125)
                run.position = lambda: "here"  # type: ignore[method-assign]
                run.complete()
        assert recovery_of(run).versions.newest() == 3
        assert run.flush(tmp_path) == 2
    saved = tmp_path / "step-00000002"
    record = verify(saved)
    assert record.step == 2
    assert decode(record.data) == {"piper callbacks": {"Counter": {"steps": 2}}, "data": "here"}
    with launch_inline(programs[str(PAIR)]) as whole, launch_inline(programs[str(PAIR)]) as resumed:
        whole.step(first)
        whole.step(second)
        whole.set_optimizer_option(0, "lr", 0.125)
        resumed.sessions.read(saved)
        assert resumed.optimizer_groups()[0]["lr"] == 0.125
        assert resumed.step(third) == whole.step(third)


@pytest.mark.parametrize("left", [1, 0])
def test_a_version_that_is_lost_while_it_is_flushed(
    programs: dict[str, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """With a machine that held it. The one before it is written, if it is complete."""

    def lose(*given: object, **more: object) -> None:
        if given[2] == 2:
            recovery_of(run).versions.forget(lambda step: step > 1 or not left)
            raise LaunchError("the state after step 2 is lost", by="recovery", hint="none")
        write_version(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("piper.run.recovery.write_version", lose)
    with recovering(programs[str(PAIR)], "inline", Options(), retries=1) as run:
        for given in batches(PAIR, 2):
            run.step(given)
            run.complete()
        assert run.flush(tmp_path) == (1 if left else None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"] * left


def test_a_repeated_step_that_differs_is_an_alarm() -> None:
    script = Script(fails={"step 3": [lost()]})
    run, events = scripted(script)
    train(run, 1, 2)
    script.memory = {1: 1}
    recovery_of(run).results[2] = StepResult(loss=2.5, grad_norm=1.0)
    assert train(run, 3, 3) == [3.0]
    assert [(e.event, e.step, e.what) for e in events if e.event == "mismatch"] == [
        ("mismatch", 2, "loss 2.5 and gradient norm 1.0 at first, 2.0 and 1.0 when repeated")
    ]


def test_options_of_the_optimizer_that_were_set_since_the_version_are_set_again() -> None:
    script = Script(fails={"step 3": [lost()]})
    run, _ = scripted(script)
    train(run, 1, 2)
    run.set_optimizer_option(0, "lr", 0.5)
    train(run, 3, 3)
    assert script.log[-5:] == ["start blank", "forget", "restore 2", "set 0 lr 0.5", "step 3"]


def test_a_save_that_was_under_way_is_made_again(tmp_path: Path) -> None:
    script = Script(fails={"step 3": [lost()]})
    run, _ = scripted(script)
    train(run, 1, 2)
    run.save(tmp_path / "saved", wait=False)
    train(run, 3, 3)
    saves = [entry for entry in script.log if entry.startswith("save")]
    assert saves == [f"save {tmp_path / 'saved'} after 2"] * 2


def test_a_save_whose_state_is_gone_is_not_forgotten(tmp_path: Path) -> None:
    """It takes longer than versions are held, and then workers are lost: the next call that waits says so."""
    script = Script(fails={"step 5": [lost()]})
    run, _ = scripted(script)
    train(run, 1, 2)
    saved = tmp_path / "step-00000002"
    run.save(saved, wait=False)
    begin(saved)
    train(run, 3, 5)
    assert recovery_of(run).saving is None and [*tmp_path.iterdir()] == [], "what was begun is removed"
    with pytest.raises(UnwrittenError) as caught:
        run.settle()
    assert str(caught.value) == cleandoc(f"""
        save: the checkpoint of step 2 was not complete when workers were lost
          path:    {saved}
          goes on: from the state after step 4, which is newer
          hint:    nothing is lost but this checkpoint; the next save is complete again
    """)
    run.settle()


def test_a_save_that_was_complete_is_not_lost(programs: dict[str, Program], tmp_path: Path) -> None:
    """The driver has not heard so when workers are lost."""
    saved = tmp_path / "step-00000002"
    with launch_inline(programs[str(PAIR)]) as whole:
        whole.save(saved)
    script = Script(fails={"step 5": [lost()]})
    run, _ = scripted(script)
    train(run, 1, 2)
    run.save(saved, wait=False)
    train(run, 3, 5)
    run.settle()
    assert verify(saved).step == 0, "it is not touched"


def test_a_stall_is_judged_by_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("piper.run.recovery.monotonic", lambda: next(now))  # a step takes 1 s
    script = Script()
    run, _ = scripted(script)
    train(run, 1, 6)
    assert script.stalls == [60.0, 60.0, 60.0, 60.0, 60.0, 10.0]
    longer = {name: value.reshape(1, 1) for name, value in batch(7).items()}
    script.stalls.clear()
    run.step(longer)  # of which no step is known yet
    train(run, 8, 8)
    assert script.stalls == [60.0, 10.0]
    given, _ = scripted(script, stall=3.0)
    train(given, 1, 6)
    assert recovery_of(given).stall == 3.0


# --- With real workers.


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {str(cell): compile(job(cell)) for cell in (PAIR, SHARDED, BUFFERS)}


def undisturbed(program: ProgramLike, cell: Cell, steps: int) -> list[StepResult]:
    with launch_inline(program) as run:
        return [run.step(batch) for batch in batches(cell, steps)]


@dataclass
class Sometimes:
    """Raises at some of its calls."""

    at: tuple[int, ...]
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.at:
            sabotage.fail()


@pytest.mark.parametrize("cell", [SHARDED, BUFFERS], ids=str)
def test_threads_recover(programs: dict[str, Program], cell: Cell) -> None:
    """A worker raises twice. All begin again from memory, and the numbers are those of one that did not."""
    program = programs[str(cell)]
    wanted = undisturbed(program, cell, 5)
    events: list[Event] = []
    chunk = next(chunk.name for chunk in program.outline.chunks if "B" in chunk.phases)
    sometimes = Sabotaged(program=program, arg=f"F {chunk}", act=Sometimes((6, 13)))
    with recovering(sometimes, "inline", Options(), retries=2, notify=events.append) as run:
        got = [run.step(given) for given in batches(cell, 5)]
        state = run.state_dict()
    assert got == wanted
    assert [e.event for e in events] == ["failure", "recovery"] * 2
    with launch_inline(program) as whole:
        for given in batches(cell, 5):
            whole.step(given)
        assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("on", ["inline", "local"])
def test_an_answer_that_is_lost_costs_no_bit(
    programs: dict[str, Program], on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of the third step is complete on all devices, but a worker is lost before the driver knows."""
    wanted, events = undisturbed(programs[str(SHARDED)], SHARDED, 5), list[Event]()
    first, second, third, *others = batches(SHARDED, 5)
    with recovering(programs[str(SHARDED)], on, Options(), retries=1, notify=events.append) as run:
        got = [run.step(first), run.step(second)]
        workers, until = recovery_of(run).current, time.monotonic() + 60
        assert workers is not None
        step = workers.step

        def unheard(given: Mapping[str, Tensor]) -> StepResult:
            step(given)
            while recovery_of(run).versions.newest() != 3:  # processes write it after they have answered
                assert time.monotonic() < until
                time.sleep(0.001)
            raise lost()

        monkeypatch.setattr(workers, "step", unheard)
        got += [run.step(given) for given in (third, *others)]
    assert got == wanted
    assert [(e.event, e.step, e.version) for e in events] == [("failure", 3, None), ("recovery", 3, 2)]


def test_a_run_over_several_shapes_recovers(programs: dict[str, Program]) -> None:
    """Workers that are started again get the programs of the other shapes; nothing is compiled again."""
    program = programs[str(BUFFERS)]
    given = [
        {name: value[: 4 if n % 2 else 8] for name, value in b.items()}
        for n, b in enumerate(batches(BUFFERS, 6))
    ]
    found, compiled = [], []
    chunk = next(chunk.name for chunk in program.outline.chunks if "B" in chunk.phases)
    for at in ((), (5,)):
        sometimes = Sabotaged(program=program, arg=f"F {chunk}", act=Sometimes(at))
        events: list[Event] = []
        with recovering(sometimes, "inline", Options(), retries=2, notify=events.append) as run:
            found.append(([run.step(batch) for batch in given], run.state_dict()))
        assert [event.event for event in events] == ["failure", "recovery"] * len(at)
        compiled.append(len(program.shapes))
    assert compiled == [1, 1]
    (wanted, whole), (got, state) = found
    assert got == wanted
    assert all(torch.equal(state[name], value) for name, value in whole.items())


def test_threads_that_fail_again_and_again(programs: dict[str, Program]) -> None:
    """In every second step of new workers: three retries lead to step 5."""
    broken = Sabotaged(program=programs[str(PAIR)], arg="F PP=1", act=sabotage.fail)
    events: list[Event] = []
    with (
        recovering(broken, "inline", Options(), retries=3, notify=events.append) as run,
        pytest.raises(WorkerError) as caught,
    ):
        for given in batches(PAIR, 6):
            run.step(given)
    assert run.done == 4
    shown = re.sub(r"process \d+", "process N", str(caught.value))
    assert re.match(r"device 1 \(process N\): BrokenError: the glass is broken\n  at: ", shown)
    assert [(e.event, e.step) for e in events] == [
        (event, step) for step in (2, 3, 4) for event in ("failure", "recovery")
    ]


@dataclass
class Killer:
    """Signals workers of a local run at random moments."""

    run: Run
    rng: random.Random
    sent: list[float] = field(default_factory=list)

    def pids(self) -> list[int]:
        group = cast(LocalWorkerGroup, self.run.session.group)
        return [] if group is None else [*group.processes.values()]

    def send(self, number: signal.Signals = signal.SIGKILL, among: int = 1) -> None:
        for pid in self.rng.sample(self.pids(), among):
            os.kill(pid, number)
        self.sent.append(time.monotonic())


def shared_memory() -> set[str]:
    """Return what is in shared memory, but for the states of elastic runs, which other tests may have."""
    names = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("piper", "tmp"))}
    return {name for name in names if not name.startswith(MOVED)}


@pytest.fixture(scope="module")
def local(programs: dict[str, Program]) -> Iterator[tuple[Run, list[Event]]]:
    """One run on processes that all tests disturb in turn: what they share is the warm fork server."""
    before = shared_memory()
    events: list[Event] = []
    with recovering(programs[str(SHARDED)], "local", Options(), retries=10**6, notify=events.append) as run:
        yield run, events
    assert shared_memory() == before


@pytest.mark.timeout(180)
def test_processes_recover_from_kills_and_stops(
    programs: dict[str, Program], local: tuple[Run, list[Event]], tmp_path: Path
) -> None:
    """Killed during the copy, during a step, two at once and stopped; a checkpoint on the way is complete."""
    run, events = local
    steps = 7
    wanted = undisturbed(programs[str(SHARDED)], SHARDED, steps)
    killer, got = Killer(run, random.Random(5)), []
    for number, given in enumerate(batches(SHARDED, steps), start=1):
        match number:
            case 2 | 3:
                killer.send()
            case 4:
                killer.send(among=2)
            case 5:
                run.settle()  # what was lost with step 4 is written a second time
                killer.send(signal.SIGSTOP)
        got.append(run.step(given))
        if number == 3:
            run.save(tmp_path / "step-3", wait=False)
    assert got == wanted
    assert verify(tmp_path / "step-3").step == 3
    assert [e.event for e in events] == ["failure", "recovery"] * 4
    assert [e.what for e in events if e.event == "failure"] == [
        "the process was killed by SIGKILL",
        "the process was killed by SIGKILL",
        "the process was killed by SIGKILL",
        "the process is stopped by a signal",
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_processes_recover_in_a_run_over_several_shapes(programs: dict[str, Program]) -> None:
    """One is killed before a step of another shape, one after it: that step is repeated with its program."""
    program = programs[str(BUFFERS)]
    sizes = (8, 4, 7, 8, 4)
    rows = zip(sizes, batches(BUFFERS, len(sizes)), strict=True)
    given = [{name: value[:size] for name, value in batch.items()} for size, batch in rows]
    with launch_inline(program) as run:
        wanted = [run.step(batch) for batch in given]
    events: list[Event] = []
    with recovering(program, "local", Options(), retries=3, notify=events.append) as recovered:
        killer, got = Killer(recovered, random.Random(5)), []
        for number, batch in enumerate(given):
            if number in (1, 3):
                killer.send()
            got.append(recovered.step(batch))
    assert got == wanted
    assert [event.event for event in events] == ["failure", "recovery"] * 2


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_fork_server_that_is_lost_is_replaced(
    programs: dict[str, Program], local: tuple[Run, list[Event]]
) -> None:
    run, events = local
    before, done = len(events), run.done
    forks = cast(LocalStarter, recovery_of(run).starter).forks
    assert forks is not None
    os.kill(forks.server, signal.SIGKILL)
    run.step(batches(SHARDED, 1)[0])
    assert run.done == done + 1 and events[-1].event == "recovery"
    assert [e.event for e in events[before:]].count("recovery") == 1


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_hang_in_a_kernel_is_named_and_over_in_time(programs: dict[str, Program], tmp_path: Path) -> None:
    once = sabotage.SleepOnce(path=tmp_path / "slept")
    stuck = Sabotaged(program=programs[str(PAIR)], arg="F PP=1", act=once)
    events: list[Event] = []
    wanted = undisturbed(programs[str(PAIR)], PAIR, 4)
    with recovering(stuck, "local", Options(), retries=1, stall=2.0, notify=events.append) as run:
        began = time.monotonic()
        got = [run.step(given) for given in batches(PAIR, 4)]
        took = time.monotonic() - began
    assert got == wanted
    assert [e.event for e in events] == ["failure", "recovery"]
    assert (events[0].device, events[0].what) == (
        1,
        "F[PP=1 MB=1] has not ended, and others waited 2 s for it",
    )
    assert took < 60, "a hang takes the stall and a restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """Slows one process, while its number stands in a file."""

    path: Path

    def __call__(self) -> None:
        if self.path.read_text(encoding="ascii") == str(os.getpid()):
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slowed_worker_is_named(tmp_path: Path) -> None:
    cell, slow = Cell(case="mlp", schedule="none", dp=2), tmp_path / "slow"
    slow.write_text("0", encoding="ascii")
    program = compile(job(cell))
    given = batches(cell, 26)
    with launch_inline(program) as whole:
        wanted = [whole.step(one) for one in given]
    trap = Sabotaged(program=program, arg="F PP=0", act=Slowed(path=slow))
    events: list[Event] = []
    with recovering(trap, "local", Options(), retries=0, notify=events.append) as run:
        slow.write_text(str(Killer(run, random.Random(1)).pids()[1]), encoding="ascii")
        assert [run.step(one) for one in given] == wanted
    assert [(e.event, e.device) for e in events] == [("straggler", 1)]
