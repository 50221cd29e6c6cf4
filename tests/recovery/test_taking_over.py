"""A driver that takes the place of one that was killed, at each moment at which the state is in another place."""

import copy
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import cast

import pytest
from torch import Tensor

from piper.checkpoint.folder import verify
from piper.checkpoint.json_state import decode
from piper.compiler import Program, compile
from piper.data.feed import Feed
from piper.directives import protect
from piper.errors import ConfigError
from piper.ir.select import at
from piper.launchers.base import StepResult
from piper.launchers.inline import launch_inline
from piper.launchers.transport.fork_server import FORKED, NOTICE, ForkConnection, ForkServer
from piper.launchers.transport.versions import Versions
from piper.recovery.elastic import ElasticRange, ElasticRun
from piper.recovery.journal import Journal
from piper.recovery.moving_states import MovingStates
from piper.recovery.recovering_run import RecoveringRun, recovering
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.train.elastic_programs import Programs
from piper.train.supervised import Driver, moved
from tests.recovery import test_elastic as elastic
from tests.recovery.test_recovery import Counter
from tests.runtime.grid import Cell, batches, job, strategy

PAIR = Cell(case="mlp", schedule="1f1b", dp=1)


@dataclass
class Forks:
    """A fork server that notes when it was asked to end the workers of an earlier driver."""

    log: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.log.append("clear")


@dataclass
class Drivers:
    """Drivers of one run, one after the other, as a supervisor starts them. All are in this process."""

    program: Program
    sizes: ElasticRange | None = None
    past: bool = False
    forks: Forks = field(default_factory=Forks)
    journal: Journal = field(default_factory=Journal)
    killed: int = 0

    def __post_init__(self) -> None:
        self.states = None if self.sizes is None else MovingStates()
        self.memory = (Versions(self.program.plans), Versions(self.program.plans))

    @contextmanager
    def drive(self) -> Iterator["Driven"]:
        """Let the next driver run. The end of the block is its death."""
        lent = (self._lent(self.memory[0]), self._lent(self.memory[1]))
        progress = self.journal.progress()
        driver = Driver(
            memory=lent,
            journal=self.journal,
            forks=cast(ForkConnection, self.forks),
            left=3,
            failed_at=monotonic() if self.killed else None,
            progress=progress,
            states=self.states,
        )
        made = self.program.job
        feed, positions = Feed(made.data, made.seed), dict[int, object]()
        make = RecoveringRun if self.sizes is None else partial(ElasticRun, sizes=self.sizes)
        with recovering(
            self.program,
            "inline",
            Options(blank=self.past),
            retries=3,
            kept=driver.kept(feed, positions),
            make=make,
        ) as run:
            yield Driven(run=run, driver=driver, feed=feed, positions=positions)
            if isinstance(run, ElasticRun):
                run.folders.clear()  # a killed process removes nothing
                run.states = None
        self.killed += 1
        if self.states is not None:
            self.states.clear(moved(self.journal.progress()))

    def _lent(self, versions: Versions) -> Versions:
        """Return the same memory, as a forked process has it."""
        made = copy.copy(versions)
        made.descriptors = {d: [*map(os.dup, found)] for d, found in versions.descriptors.items()}
        return made

    def close(self) -> None:
        for versions in self.memory:
            versions.close()
        self.journal.close()
        if self.states is not None:
            assert [*self.states.path.iterdir()] == []
            self.states.close()


@dataclass
class Driven:
    run: RecoveringRun
    driver: Driver
    feed: Feed
    positions: dict[int, object]

    def begin(self) -> None:
        self.positions[self.run.done] = self.feed.state_dict() if self.run.done else None
        self.driver.begin(self.run, self.positions, None)

    def step(self, *, commit: bool = True) -> StepResult:
        result = self.run.step(cast("dict[str, Tensor]", next(self.feed)))
        self.positions[self.run.done] = self.feed.state_dict()
        if commit:
            self.commit()
        return result

    def commit(self) -> None:
        self.run.complete()
        self.driver.commit(self.run, self.positions, ended=False)


@pytest.fixture(scope="module")
def pair() -> Program:
    return compile(job(PAIR, data=lambda: batches(PAIR, 8)))


@pytest.fixture
def wanted(pair: Program) -> list[StepResult]:
    with launch_inline(pair) as run:
        return [run.step(batch) for batch in batches(PAIR, 8)]


def test_a_driver_that_is_killed_before_the_first_version_of_a_resumed_run(
    pair: Program, wanted: list[StepResult], tmp_path: Path
) -> None:
    """The next one begins from the same checkpoint, with which its workers began, not from blank values."""
    saved = tmp_path / "step-3"
    with launch_inline(pair) as run:
        for batch in batches(PAIR, 3):
            run.step(batch)
        run.save(saved)
    drivers = Drivers(pair, past=True)
    with drivers.drive() as first:
        found = first.run.load(saved)
        first.feed.seek(found.step)
        first.begin()
    assert drivers.forks.log == []
    with drivers.drive() as second:
        assert drivers.forks.log == ["clear"], "before anything is read"
        assert second.run.done == 3
        assert [second.step(), second.step()] == wanted[3:5]
        second.step(commit=False)  # it is in the metrics, and not in the journal
    with drivers.drive() as third:
        assert third.run.done == 5
        assert [third.step() for _ in range(3)] == wanted[5:]
    drivers.close()


def test_a_version_that_the_journal_does_not_cover_is_not_taken(
    pair: Program, wanted: list[StepResult]
) -> None:
    """At each step: killed when the step was trained and reported, and the journal does not have it."""
    drivers, got = Drivers(pair), list[StepResult]()
    with drivers.drive() as first:
        first.begin()
        first.step(commit=False)
    for number in range(8):
        with drivers.drive() as one:
            assert one.run.done == number
            got.append(one.step())
            if number < 7:
                assert one.step(commit=False) == wanted[number + 1]
    assert got == wanted
    drivers.close()


def test_a_driver_that_is_preempted_before_it_has_begun(tmp_path: Path) -> None:
    """The newest version is of a step before the last one, and is saved with the callbacks of that step."""
    counter, asked = Counter(), protect(at())
    made = job(PAIR, strategy=[*strategy(PAIR), asked], data=lambda: batches(PAIR, 8), callbacks=[counter])
    drivers = Drivers(compile(made))
    with drivers.drive() as first:
        first.begin()
        for _ in range(3):
            result = first.step(commit=False)
            counter.on_step(first.run, first.run.done, result)
            first.commit()
    with drivers.drive() as second:
        assert second.run.run is None, "no worker has started"
        assert second.run.flush(tmp_path, second.positions) == 2
    record = verify(tmp_path / "step-00000002")
    assert record.step == 2
    assert decode(record.data)["piper callbacks"] == {"Counter": {"steps": 2}}  # type: ignore[index]
    drivers.close()


def find(made: Programs, size: int) -> ProgramLike:
    if size == 3:
        raise ConfigError("no", by="test", hint="none")
    return made.program(size)


@pytest.fixture(scope="module", params=[False, True], ids=["between", "protected"])
def sized(request: pytest.FixtureRequest) -> Iterator[tuple[Program, ElasticRange]]:
    """A job of two to four devices. Its versions are made between steps, or by instructions of the next step."""
    asked = [protect(at())] if request.param else []

    def strategy(devices: Sequence[int]) -> list[object]:
        return [*elastic.strategy(devices), *asked]

    program = compile(elastic.job(strategy=strategy, data=lambda: elastic.batches(12)))
    made = Programs(program)
    yield program, ElasticRange(fewest=2, most=4, program=partial(find, made))
    made.close()


def test_a_driver_that_is_killed_while_the_state_moves(sized: tuple[Program, ElasticRange]) -> None:
    """Right after a move, after two of them, and before the first step in the new layout is complete."""
    before = elastic.memory()
    drivers, losses = Drivers(*sized), list[float]()
    with drivers.drive() as one:
        one.begin()
        losses += [one.step().loss, one.step().loss]
        one.run.resize(2)  # between two steps, as a callback does after the journal has the step
    with drivers.drive() as one:
        assert isinstance(one.run, ElasticRun) and len(one.run.places) == 4
        losses.append(one.step(commit=False).loss)
        one.run.resize(2)
        one.commit()  # there is no version of the new layout, if instructions make them
    with drivers.drive() as one:
        assert isinstance(one.run, ElasticRun) and len(one.run.places) == 2
        one.step(commit=False)
    with drivers.drive() as one:
        one.run.resize(4)  # before there is a version of the layout that the journal has
    with drivers.drive() as one:
        losses.append(one.step(commit=False).loss)
        one.run.resize(4)
        one.run.resize(2)
        one.run.resize(4)
    with drivers.drive() as one:
        assert isinstance(one.run, ElasticRun) and len(one.run.places) == 2
        losses[-1] = one.step().loss
        one.run.resize(4)
        losses.append(one.step().loss)
        one.run.shrunk = True
        losses.append(one.step().loss)
    with drivers.drive() as one:
        assert isinstance(one.run, ElasticRun) and len(one.run.places) == 4 and one.run.shrunk
        losses += [one.step().loss for _ in range(2)]
        elastic.assert_plain(losses, one.run.state_dict())
    drivers.close()
    assert elastic.memory() == before


def test_versions_that_are_written_over_count_as_free(
    sized: tuple[Program, ElasticRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two memories one is needed by the next driver, and the other has the layout before this one."""
    drivers, taken = Drivers(*sized), list[int]()

    def note(wanted: int, asked: object) -> None:
        assert isinstance(one.run, ElasticRun)
        files = drivers.memory[1 - one.run.safe].descriptors.values()
        taken.append(sum(os.fstat(file).st_blocks for pair in files for file in pair))

    with drivers.drive() as one:
        one.begin()
        losses = [one.step().loss]
        with monkeypatch.context() as patched:
            patched.setattr("piper.launchers.transport.versions.check_memory", note)
            for size in (2, 4, 2):
                one.run.resize(size)
                losses += [one.step().loss, one.step().loss]
            patched.setattr("piper.launchers.transport.versions.check_memory", elastic.refuse)
            with pytest.raises(ConfigError):
                one.run.resize(4)
            losses.append(one.step().loss)
        assert taken == [0, 0, 0]
    with drivers.drive() as one:
        assert isinstance(one.run, ElasticRun) and len(one.run.places) == 2
        losses.append(one.step().loss)
        elastic.assert_plain(losses, one.run.state_dict())
    drivers.close()


def test_workers_of_an_earlier_connection_are_gone_when_it_is_cleared() -> None:
    """Also those of a fork server that is stopped, which could write versions when it goes on."""
    server, (here, there) = ForkServer("tests.launchers.idle", "json"), socket.socketpair()
    with here, there:
        try:
            first = server.lend()
            worker = first.fork([there.fileno()])
            second = server.lend()
            second.clear()
            assert not Path(f"/proc/{worker}").exists()
            last = second.fork([there.fileno()])
            os.kill(server.server, signal.SIGSTOP)
            third = server.lend()
            third.clear()
            until = monotonic() + 60
            while Path(f"/proc/{last}").exists():
                assert monotonic() < until
            for connection in (first, second, third):
                connection.close()
        finally:
            server.close()


def test_a_process_with_the_number_of_one_that_has_ended_lives() -> None:
    here, there = socket.socketpair()
    with here, there:
        forks = ForkConnection(here, os.getpid())
        forks.ready, forks.exits[7] = True, -signal.SIGKILL
        there.sendall(NOTICE.pack(FORKED, 7, 0))
        assert forks.fork([there.fileno()]) == 7 and forks.ended() == {}
