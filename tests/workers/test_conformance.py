"""One suite that every launcher passes: the same bits, the same errors, and an end that can be asked for twice.

`tests/gpu/test_ranks_launchers.py` runs it on ranks that use NCCL, whose sums have other last bits.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from inspect import cleandoc

import pytest
import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.errors import ConfigError, WorkerError
from piper.run.launch import launch, launch_inline, launch_local
from piper.run.launch import launcher as launch_on
from piper.run.run import Run
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.local import LocalWorkerGroup
from piper.workers.processes import gone
from piper.workers.results import StepResult
from piper.workers.transport.fork_server import ForkServer
from tests.runtime.grid import Cell, batches, job
from tests.workers import sabotage
from tests.workers.sabotage import Sabotaged

COMPOSED = Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3)  # pipeline, replicas, shards, ties
EXPERTS = Cell(case="moe", schedule="none", dp=2, zero=3, ways=2, rows=1)
BUFFERS = Cell(case="convnet", schedule="none", dp=2, zero=1)
PAIR = Cell(case="mlp", schedule="1f1b", dp=1)  # two devices: enough to fail
CELLS = {str(cell): cell for cell in (COMPOSED, EXPERTS, BUFFERS)}
STEPS = 2
Launcher = Callable[[ProgramLike, Options], AbstractContextManager[Run]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run leaves."""

    results: list[StepResult]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


Same = Callable[[Trained, Trained], None]


@pytest.fixture(scope="module", params=["inline", "local", pytest.param("ray", marks=pytest.mark.ray)])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """A launcher; what it can share between launches is started once."""
    match request.param:
        case "inline":
            yield launch_inline
        case "local":
            with closing(ForkServer()) as forks:
                yield lambda program, options: launch_local(program, options, forks)
        case "ray":
            pytest.importorskip("ray")
            from piper.workers.ray import cluster

            with cluster(4):
                yield lambda program, options: launch_on(program, "ray", options)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {str(cell): compile(job(cell)) for cell in (*CELLS.values(), PAIR)}


def train(launcher: Launcher, program: ProgramLike, cell: Cell) -> Trained:
    with launcher(program, Options(keep_gradients=True)) as run:
        results = [run.step(batch) for batch in batches(cell, STEPS)]
        return Trained(results=results, state=run.state_dict(), gradients=run.gradients())


def assert_same_bits(left: Trained, right: Trained) -> None:
    assert left.results == right.results
    for these, those in ((left.state, right.state), (left.gradients, right.gradients)):
        assert these.keys() == those.keys()
        assert all(torch.equal(value, those[name]) for name, value in these.items())


@pytest.fixture(scope="module")
def same() -> Same:
    """How runs are compared."""
    return assert_same_bits


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CELLS)
def test_every_launcher_gives_the_same_bits(
    launcher: Launcher, programs: dict[str, Program], same: Same, name: str
) -> None:
    wanted = train(launch_inline, programs[name], CELLS[name])
    same(train(launcher, programs[name], CELLS[name]), wanted)


def test_the_same_bits_every_time(programs: dict[str, Program]) -> None:
    program = programs[str(COMPOSED)]
    first, second = (train(launch_inline, program, COMPOSED) for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.timeout(180)
def test_an_exception_is_one_error_and_the_end(launcher: Launcher, programs: dict[str, Program]) -> None:
    broken = Sabotaged(program=programs[str(PAIR)], arg="F PP=1", act=sabotage.fail)
    with launcher(broken, Options()) as run:
        with pytest.raises(WorkerError) as caught:
            for batch in batches(PAIR, 2):
                run.step(batch)
        with pytest.raises(WorkerError) as after:
            run.step(batches(PAIR, 1)[0])
    shown = re.sub(r"process \d+", "process N", str(caught.value))
    assert re.match(r"device 1 \(process N\): BrokenError: the glass is broken\n  at: ", shown)
    assert "compute on stream compute: F[PP=1" in shown
    assert str(after.value) == "run: the workers have ended\n  hint: launch the program again"


@pytest.mark.timeout(180)
def test_every_launcher_trains_on_several_shapes(
    launcher: Launcher, programs: dict[str, Program], same: Same
) -> None:
    sizes = (4, 2, 4, 3, 2)  # 3 samples do not divide into 2 microbatches
    rows = batches(PAIR, len(sizes))
    given = [{name: v[:size] for name, v in batch.items()} for size, batch in zip(sizes, rows, strict=True)]
    found = []
    for start in (launch_inline, launcher):
        with start(programs[str(PAIR)], Options(keep_gradients=True)) as run:
            results = [run.step(batch) for batch in given]
            found.append(Trained(results=results, state=run.state_dict(), gradients=run.gradients()))
    same(found[1], found[0])
    assert len(programs[str(PAIR)].shapes) == 2


@pytest.mark.timeout(180)
def test_a_batch_with_other_axes_is_refused_and_the_run_goes_on(
    launcher: Launcher, programs: dict[str, Program]
) -> None:
    batch = batches(PAIR, 1)[0]
    with launcher(programs[str(PAIR)], Options()) as run:
        with pytest.raises(ConfigError, match="the batch is not like the one that was compiled"):
            run.step({name: value[:, None] for name, value in batch.items()})
        assert run.step(batch).loss > 0
        run.close()
        run.close()


@pytest.mark.timeout(180)
def test_closing_kills_a_worker_that_does_not_answer(
    launcher: Launcher, programs: dict[str, Program]
) -> None:
    with launcher(programs[str(PAIR)], Options()) as run:
        workers = run.session.group
        if not isinstance(workers, LocalWorkerGroup):
            pytest.skip("its workers are no processes of this machine")
        pids = [*workers.processes.values()]
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
        os.kill(pids[1], signal.SIGSTOP)
    assert [gone(pid) for pid in pids] == [True, True]


@pytest.mark.parametrize("on", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_launch_by_name(programs: dict[str, Program], on: str) -> None:
    with launch(programs[str(BUFFERS)], on) as run:
        assert run.step(batches(BUFFERS, 1)[0]).loss > 0


def test_an_unknown_launcher(programs: dict[str, Program]) -> None:
    with ExitStack() as held, pytest.raises(ConfigError) as caught:
        held.enter_context(launch(programs[str(BUFFERS)], "moon"))
    assert str(caught.value) == cleandoc("""
        launch: there is no launcher 'moon'
          hint: on is one of inline, local, ray, torchrun, rank:N
    """)
