"""Elastic jobs: 4 -> 2 -> 4 devices while training, equal to one device in fp64."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import cleandoc
from itertools import count
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.checkpoint.folder import verify
from piper.checkpoint.json_state import decode
from piper.compiler import Program, compile
from piper.errors import ConfigError, LaunchError, ScheduleError, WorkerError
from piper.job import strategy_of
from piper.run.driver_checkpoints import write_version
from piper.run.elastic import MOVED, ElasticRange, ElasticRecovery
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run import Run
from piper.run.run_events import Event
from piper.run.session import Session
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.train.train_options import SizeFile, sizes_of
from piper.workers.group import A, R, Starter, WorkerGroup
from piper.workers.inline import InlineStarter
from piper.workers.processes import gone
from piper.workers.serve import WorkerAnswers
from piper.workers.transport.versions import too_little
from tests import plain
from tests.run.recoveries import disk_with, elastic_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def strategy(devices: Sequence[int]) -> list[piper.Directive]:
    """Two stages of replicas: the parameters lie elsewhere in each size."""
    half = len(devices) // 2
    return [
        piper.replicate(piper.at(PP=0), devices[:half], zero=3),
        piper.replicate(piper.at(PP=1), devices[half:], zero=1),
        piper.split(piper.at(), parts=2),
    ]


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(8, 8, generator=generator, dtype=torch.float64)} for _ in range(steps)]


def job(**changes: object) -> piper.Job:
    fields: dict[str, object] = {
        "model": Net,
        "loss": lambda model, batch: (model(batch["x"]) - batch["x"]).square().mean(),
        "data": lambda: batches(100),
        "strategy": strategy,
        "elastic": (2, 4),
        "precision": "fp64",
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05),
    }
    return piper.Job(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(job())


@pytest.fixture(scope="module")
def sizes(program: Program) -> ElasticRange:
    return without_three(program)


def without_three(program: Program) -> ElasticRange:
    """Return the sizes of a job that cannot have three devices."""
    every = sizes_of(program, 2, 4)

    def find(size: int) -> ProgramLike:
        if size == 3:
            raise ConfigError("no", by="test", hint="none")
        return every.program(size)

    return replace(every, program=find)


@contextmanager
def running(
    program: Program, sizes: ElasticRange, events: list[Event], on: str = "inline", retries: int = 1
) -> Iterator[Run]:
    make = partial(ElasticRecovery, sizes=sizes)
    with recovering(program, on, Options(), retries=retries, notify=events.append, make=make) as run:
        yield run


def cycles(run: Run, count: int, each: int) -> list[float]:
    """Train `each` steps in each size, over and over. Parameters move without a changed bit."""
    losses, given = [], iter(batches(2 * count * each))
    for size in (4, 2) * count:
        before = run.state_dict()
        run.resize(size)
        assert all(torch.equal(value, before[name]) for name, value in run.state_dict().items())
        losses += [run.step(next(given)).loss for _ in range(each)]
    return losses


def assert_plain(losses: list[float], state: Mapping[str, Tensor]) -> None:
    made = job()
    wanted = plain.train(Net, made.loss, batches(len(losses)), optimizer=made.optimizer)  # type: ignore[arg-type]
    assert max(abs(got - want) for got, want in zip(losses, wanted.losses, strict=True)) < 1e-9
    assert plain.largest_difference(wanted.state, state) < 1e-9


def memory() -> set[str]:
    """Return the folders of states that are left: by this process, or by processes that have ended."""
    found: set[str] = set()
    for path in Path("/dev/shm").glob(f"{MOVED}*"):
        process = int(path.name.removeprefix(MOVED).partition("-")[0])
        if process == os.getpid() or gone(process):
            found.add(path.name)
    return found


def test_four_devices_two_and_four_again(program: Program, sizes: ElasticRange) -> None:
    events: list[Event] = []
    with running(program, sizes, events) as run:
        assert_plain(cycles(run, 2, 2), run.state_dict())
    assert [(e.event, e.step, e.what) for e in events if e.event == "resize"] == [
        ("resize", 2, "going on with 2 devices instead of 4: as asked"),
        ("resize", 4, "going on with 4 devices instead of 2: as asked"),
        ("resize", 6, "going on with 2 devices instead of 4: as asked"),
    ]
    assert [e.event for e in events] == ["resize", "recovery"] * 3


@dataclass
class Broken:
    """A starter whose device 1 is lost in every third step, where there are four devices."""

    starter: InlineStarter
    starts: list[int] = field(default_factory=list)

    def start(self, options: Options) -> WorkerGroup:
        group = self.starter.start(options)
        self.starts.append(len(group.devices))
        steps, ask = count(1), group.ask

        def fail(call: Callable[[WorkerAnswers, A], R], arguments: Mapping[int, A]) -> dict[int, R]:
            if call.__name__ == "step" and next(steps) == 3 and self.starts[-1] == 4:
                error = WorkerError("the process was killed by SIGKILL", by="device 1", hint="none")
                error.kind, error.device, error.place = "dead", 1, len(self.starts)
                raise error
            return ask(call, arguments)

        group.ask = fail  # type: ignore[method-assign]
        return group

    def __getattr__(self, name: str) -> object:
        return getattr(self.starter, name)


def test_a_device_that_is_lost_for_good(
    program: Program, sizes: ElasticRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No retry is left, and three devices have no program: two go on, and later all four are tried."""
    monkeypatch.setattr("piper.run.elastic.REFILL", 4)
    events: list[Event] = []
    with running(program, sizes, events) as run:
        broken = Broken(cast(InlineStarter, elastic_of(run).starter))
        elastic_of(run).starter, elastic_of(run).current = cast(Starter, broken), None
        losses = [run.step(batch).loss for batch in batches(12)]
        assert_plain(losses, run.state_dict())
        assert broken.starts == [4, 4, 2, 4, 2] and [*elastic_of(run).places] == [0, 2]
    assert [(e.event, e.step, e.left) for e in events if e.event != "recovery"] == [
        ("failure", 3, 0), ("failure", 5, 1), ("resize", 5, None), ("resize", 8, None),
        ("failure", 11, 1), ("resize", 11, None),
    ]  # fmt: skip


@dataclass
class Gone(Broken):
    """A starter for which a device is lost once, the newest version with it, and that never comes back."""

    def start(self, options: Options) -> WorkerGroup:
        devices = len(self.starter.program.plans.devices)
        if devices == 4 and 2 in self.starts:
            self.starts.append(0)
            raise LaunchError("no process can be started", by="launch", hint="none")
        return super().start(options)


def test_a_device_that_has_not_come_back(
    program: Program, sizes: ElasticRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that cannot start take no version. The state that has moved is there, and is what goes on.

    A version that is lost while it moves is looked for again. What is repeated with other devices has other
    bits, which is no alarm.
    """
    monkeypatch.setattr("piper.run.elastic.REFILL", 4)
    lost = [LaunchError("the state after step 2 is lost", by="recovery", hint="none")]

    def once(*given: object, **more: object) -> None:
        if lost:
            elastic_of(run).versions.forget(lambda step: step == run.done)
            raise lost.pop()
        write_version(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("piper.run.elastic.write_version", once)
    events, before = list[Event](), memory()
    with running(program, sizes, events, retries=1) as run:
        elastic_of(run).left = 0
        gone = Gone(cast(InlineStarter, elastic_of(run).starter))
        elastic_of(run).starter, elastic_of(run).current = cast(Starter, gone), None
        assert_plain([run.step(batch).loss for batch in batches(9)], run.state_dict())
        assert gone.starts == [4, 2, 0, 2] and len(elastic_of(run).places) == 2
    assert [(e.event, e.step) for e in events if e.event != "recovery"] == [
        ("failure", 3), ("failure", 3), ("resize", 3), ("resize", 6), ("failure", 6), ("resize", 6),
    ]  # fmt: skip
    assert memory() == before


@dataclass
class Narrow(Broken):
    """Several machines that have room for so many devices, each time they are asked."""

    rooms: list[int] = field(default_factory=list)
    near: bool = False

    def room(self, *, warm: bool = False) -> int:
        return self.rooms.pop(0)


def test_a_machine_that_is_lost_and_one_that_comes(
    program: Program, sizes: ElasticRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on with the devices that have room, and the state moves where all machines see it."""
    monkeypatch.setattr("piper.run.elastic.REFILL", 4)
    events: list[Event] = []
    with running(program, sizes, events) as run:
        narrow = Narrow(cast(InlineStarter, elastic_of(run).starter), rooms=[3, 3, 3, 4, 4])
        elastic_of(run).starter, elastic_of(run).current = cast(Starter, narrow), None
        with pytest.raises(ConfigError) as caught:
            run.resize(2)
        elastic_of(run).disk = disk_with(
            folder=tmp_path, past=lambda last: [], batches=lambda found: iter(())
        )
        assert_plain([run.step(batch).loss for batch in batches(12)], run.state_dict())
        assert narrow.starts == [4, 2, 4] and narrow.rooms == []
    assert [(e.step, e.what) for e in events if e.event == "resize"] == [
        (3, "going on with 2 devices instead of 4: there is room for 3"),
        (10, "going on with 4 devices instead of 2: lost ones are tried"),
    ]
    assert [*tmp_path.iterdir()] == []
    assert str(caught.value) == cleandoc("""
        resize: the number of devices cannot change on several machines without checkpoints
          hint: give the job a folder that all machines see: piper.Job(checkpoint=...)
    """)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("copies", [0, 1])
def test_a_protected_job_changes_its_size(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asked, and when a device is lost for good: the plan of each size copies the state in its own layout."""
    monkeypatch.setattr("piper.run.elastic.REFILL", 4)
    asked = piper.protect(piper.at(), copies=copies, apart="device")
    made = job(strategy=lambda devices: [*strategy(devices), asked])
    whole = compile(made)
    sizes, events = without_three(whole), list[Event]()
    with running(whole, sizes, events) as run:
        assert_plain(cycles(run, 2, 3), run.state_dict())
    with running(whole, sizes, events) as run:
        broken = Broken(cast(InlineStarter, elastic_of(run).starter))
        elastic_of(run).starter, elastic_of(run).current = cast(Starter, broken), None
        assert_plain([run.step(batch).loss for batch in batches(12)], run.state_dict())
        assert 2 in broken.starts
    assert not [event for event in events if event.event == "mismatch"]


def test_a_size_for_which_there_is_too_little_memory(
    program: Program, sizes: ElasticRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on as it was, also if it has changed its size before, and later it can change."""
    with running(program, sizes, []) as run:
        losses, given = list[float](), iter(batches(8))
        for size, other in ((4, 2), (2, 4)):
            run.resize(size)
            losses.append(run.step(next(given)).loss)
            with monkeypatch.context() as patched:
                patched.setattr("piper.workers.transport.versions.check_memory", refuse)
                with pytest.raises(ConfigError):
                    run.resize(other)
                assert len(elastic_of(run).places) == size
                losses += [run.step(next(given)).loss for _ in range(2)]
            elastic_of(run)._end()
            losses.append(run.step(next(given)).loss)
        assert_plain(losses, run.state_dict())


def refuse(wanted: int, asked: object) -> None:
    raise too_little(wanted, 0, None)


@pytest.mark.parametrize("when", ["use", "start", "step"])
def test_a_preemption_whose_time_is_over_while_the_state_moves(
    program: Program, sizes: ElasticRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """There is no version of the new layout. The state that has moved is saved, and goes on in any layout."""
    given = batches(4)
    with running(program, sizes, []) as run:
        for number in (0, 1):
            run.step(given[number])
            run.position = lambda: "here"  # type: ignore[method-assign]
            run.complete()
        run.set_optimizer_option(0, "lr", 0.02)

        def over(*given: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        if when == "step":  # as where instructions of the next step copy the state
            monkeypatch.setattr(Session, "protect", lambda session: None)
            run.resize(2)
            elastic_of(run).versions.forget(lambda step: True)
            monkeypatch.setattr(Session, "step", over)
        else:
            monkeypatch.setattr(elastic_of(run).starter, when, over)
        with pytest.raises(KeyboardInterrupt):
            run.resize(2) if when != "step" else run.step(given[2])
        assert run.flush(tmp_path) == 2
        assert run.flush(tmp_path) == 2, "once"
    saved = tmp_path / "step-00000002"
    record = verify(saved)
    assert record.step == 2 and decode(record.data) == "here"
    with launch_inline(program) as whole, launch_inline(program) as resumed:
        whole.step(given[0])
        whole.step(given[1])
        whole.set_optimizer_option(0, "lr", 0.02)
        resumed.sessions.read(saved)
        assert [resumed.step(batch) for batch in given[2:]] == [whole.step(batch) for batch in given[2:]]


def test_a_preemption_whose_time_is_over_before_the_state_has_moved(
    program: Program, sizes: ElasticRange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version of the old layout is saved, and what has moved half is removed."""
    before = memory()
    with running(program, sizes, []) as run:
        run.step(batches(1)[0])
        run.complete()

        def over(*given: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(run.sessions, "_switch", over)
        with pytest.raises(KeyboardInterrupt):
            run.resize(2)
        assert run.flush(tmp_path) == 1
    assert verify(tmp_path / "step-00000001").step == 1
    assert memory() == before


def test_programs_of_fewer_devices_are_compiled_once_from_the_same_capture(
    program: Program, sizes: ElasticRange
) -> None:
    found = sizes.program(2)
    assert found is sizes.program(2) and [*found.plans.devices] == [0, 1] and sizes.program(4) is program
    assert [directive.devices for directive in strategy_of(found.job)[:2]] == [(0,), (1,)]  # type: ignore[attr-defined]
    assert found.evaluation(batches(1)[0]).plans.buckets.keys() == found.plans.buckets.keys()


def test_a_state_that_a_killed_run_has_left_beside_its_checkpoints_goes(
    program: Program, sizes: ElasticRange, tmp_path: Path
) -> None:
    for name in ("piper-resize-left", "step-00000001"):
        (tmp_path / name).mkdir()
    disk = disk_with(folder=tmp_path, past=lambda last: [], batches=lambda found: iter(()))
    make = partial(ElasticRecovery, sizes=sizes)
    with recovering(program, "inline", Options(), retries=1, disk=disk, make=make):
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_file_asks_for_a_number_of_devices(program: Program, sizes: ElasticRange, tmp_path: Path) -> None:
    said: list[str] = []
    file = SizeFile(tmp_path, said.append)
    with running(program, sizes, []) as run:
        run.step(batches(1)[0])
        found = []
        for text in ("2\n", "2", "many", "9", "4"):
            (tmp_path / "devices").write_text(text)
            file.obey(run)
            file.obey(run)
            found.append(len(elastic_of(run).places))
    assert found == [2, 2, 2, 2, 4]
    assert [line.partition("\n")[0] for line in said] == [
        f"warning: {tmp_path / 'devices'} asks for 'many', which is not a number of devices",
        "warning: resize: the run cannot go on with 9 devices",
    ]


def test_an_exception_is_no_loss_of_a_device(program: Program, sizes: ElasticRange) -> None:
    events: list[Event] = []
    with running(program, sizes, events, retries=0) as run:
        error = WorkerError("broken", by="device 1", hint="none")
        error.kind, error.device = "error", 1
        with pytest.raises(WorkerError):
            elastic_of(run)._fail(error)
    assert events == []


def test_a_size_outside(program: Program, sizes: ElasticRange) -> None:
    with running(program, sizes, []) as run, pytest.raises(ConfigError) as caught:
        run.resize(5)
    assert str(caught.value) == cleandoc("""
        resize: the run cannot go on with 5 devices
          elastic: 2 to 4 devices
          hint:    choose a number in this range, or widen it: piper.Job(elastic=...)
    """)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"elastic": None},
            "strategy is a function of the devices, and elastic does not say how many there are",
        ),
        ({"elastic": (4, 2)}, "elastic=(4, 2)"),
        ({"elastic": (0, 2)}, "elastic=(0, 2)"),
        ({"elastic": 4}, "elastic=4"),
        ({"strategy": ()}, "elastic=(2, 4), and the strategy is tuple, for fixed devices"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(**changes)
    assert caught.value.what == said


def test_strategies_that_cannot_be() -> None:
    other = job(strategy=lambda devices: [piper.place(piper.at(), [0, 7])])
    with pytest.raises(ConfigError) as caught:
        compile(other)
    assert caught.value.what == "strategy[0] is over devices 0,7"
    assert caught.value.hint == "use the devices that the function is given: 0-3"
    with pytest.raises(ConfigError) as caught:
        compile(job(strategy=lambda devices: devices[9]))
    assert caught.value.what == "the strategy failed: IndexError: tuple index out of range"
    with pytest.raises(ScheduleError) as uneven:
        compile(job(elastic=(1, 3), strategy=lambda devices: [piper.replicate(piper.at(), devices)]))
    assert uneven.value.what == "8 samples do not divide into 3 equal pieces"


@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize(("on", "count"), [("inline", 50), ("local", 4)])
def test_fifty_cycles(program: Program, sizes: ElasticRange, on: str, count: int) -> None:
    before = memory()
    with running(program, sizes, [], on) as run:
        assert_plain(cycles(run, count, 1), run.state_dict())
    assert memory() == before


RECIPE = """
import os, time
from pathlib import Path
import torch
import piper
from piper.data import Samples
from tests.run.test_elastic import Net, strategy

class Asks(piper.callbacks.Callback):
    def on_step(self, run, step, result):
        if step in SIZES:
            Path("RUN/devices").write_text(SIZES[step])
        mark = Path(f"RUN/killed-{step}")
        if step in (9, 14) and KILLS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)

def job():
    rows = [{"x": row} for row in torch.randn(50, 8, generator=torch.Generator().manual_seed(0))]
    return piper.Job(
        model=Net, loss=lambda model, batch: (model(batch["x"]) - batch["x"]).square().mean(),
        data=lambda: Samples(rows, batch=8, seed=1), strategy=strategy, elastic=(2, 4), steps=20, callbacks=[Asks()],
        checkpoint=piper.Checkpoint(folder="RUN/saves", every=1),
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_drivers_of_a_run_that_changes_its_size_are_killed(tmp_path: Path) -> None:
    """At two devices and at four again: resumed, the metrics are those of a run whose driver was never killed.

    A resumed run begins with all devices, so its sums are rounded otherwise.
    """
    before, found = memory(), {}
    for name, kills in (("killed", "True"), ("whole", "False")):
        text = RECIPE.replace("RUN", name).replace("KILLS", kills).replace("SIZES", '{6: "2", 12: "4"}')
        (tmp_path / f"{name}.py").write_text(text)
        words = [sys.executable, "-m", "piper", "train", f"{name}.py:job", "--on", "local", "--out", name]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        codes = []
        for resume in ([], ["--resume"], ["--resume"]):
            done = subprocess.run(
                [*words, *resume],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            codes.append(done.returncode)
            if not codes[-1]:
                break
        assert codes == ([-signal.SIGKILL] * 2 if kills == "True" else []) + [0], done.stderr
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [(m["step"], m["loss"], m["grad_norm"]) for m in lines]
    assert [step for step, *_ in found["killed"]] == [step for step, *_ in found["whole"]] == [*range(1, 21)]
    for killed, whole in zip(found["killed"], found["whole"], strict=True):
        assert killed == pytest.approx(whole, rel=1e-6)
    assert memory() == before
