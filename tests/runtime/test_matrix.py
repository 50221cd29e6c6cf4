"""Every model under every schedule, with replicas, shards and experts of each kind: the numbers of one device.

Slices are of a single sample; cells alternate between clipping and not, and between streams and one line. In all
cells together any three of the model, the schedule, the number of replicas and the kind of ZeRO meet, in the matrix
any two.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest

from piper.run.launch import launch_local
from piper.runtime.worker import Options
from piper.workers.transport.fork_server import ForkServer
from tests import zoo
from tests.covering import Choices, covering, selected
from tests.runtime.grid import SHAPES, Cell, case_of
from tests.runtime.sharing import Shared, one_core

pytestmark = pytest.mark.timeout(120)
HEAVY = ("deepseek", "qwen3_moe_hf", "moe")  # first, so that the last worker to end ends early


def replicas(number: int) -> list[tuple[int, int]]:
    """(DP, zero): every DP and every zero, in other pairs for the next number."""
    zero = [(number + i) % 4 for i in range(4)]
    return [(1, 0), (2, zero[0]), (3, zero[1]), (4, zero[2]), (4, zero[3])]


def parts(schedule: str, dp: int) -> int:
    """Enough for a pipeline's steady state, where that does not cost too much."""
    if schedule == "dualpipe-v":
        return 4  # the fewest it takes
    return 2 if schedule == "none" or dp > 2 else 4


def cells() -> list[Cell]:
    """The whole matrix, model by model, so that what is captured once serves a row of cells."""
    found: list[Cell] = []
    for i, case in enumerate(zoo.NAMES):
        for j, schedule in enumerate(SHAPES):
            for number, (dp, zero) in enumerate(replicas(i + j)):
                clip = 0.3 if (i + dp) % 2 else None
                cell = Cell(
                    case=case,
                    schedule=schedule,
                    dp=dp,
                    zero=zero,
                    parts=parts(schedule, dp),
                    rows=1,
                    clip=clip,
                )
                found.append(cell)
                if case_of(cell).experts and dp % 2 == 0:
                    ways = 4 if dp == 4 and (number + j) % 2 else 2
                    found.append(replace(cell, ways=ways))
    order = [*HEAVY, *(name for name in zoo.NAMES if name not in HEAVY)]
    return sorted(found, key=lambda cell: (order.index(cell.case), -case_of(cell).stages))


def group(cell: Cell) -> str:
    return f"{cell.case}-{case_of(cell).stages}"


def in_streams(cell: Cell) -> bool:
    """Return whether a cell's communication runs on streams of its own."""
    return cell.schedule in SHAPES and (list(SHAPES).index(cell.schedule) + cell.dp) % 2 == 0


def both_ways() -> Iterator[Cell]:
    """DualPipe: each stage on two ranks, its parameters on both, with the experts whole and divided."""
    for case in zoo.NAMES:
        for dp, zero in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)]:
            clip = 0.3 if dp == zero else None
            cell = Cell(case=case, schedule="dualpipe", dp=dp, zero=zero, parts=4, rows=1, clip=clip)
            yield cell
            if dp > 1 and case_of(cell).experts:
                yield replace(cell, ways=2)


def choices(cell: Cell) -> Choices:
    """Return what a cell chooses on each axis of the matrix."""
    named = {name: getattr(cell, name) for name in ("case", "schedule", "dp", "zero", "ways", "clip")}
    return named | {"streams": in_streams(cell)}


@cache
def chosen() -> list[Cell]:
    """Return cells in which every two values of two axes meet. Where several do, two replicas are preferred."""
    every = [*cells(), *both_ways()]
    return covering(sorted(every, key=lambda cell: abs(cell.dp - 2)), choices)


@pytest.fixture(scope="session")
def shared() -> Shared:
    return Shared()


@pytest.mark.parametrize("cell", selected(cells(), chosen(), group))
def test_cell(shared: Shared, cell: Cell) -> None:
    with one_core():
        report = shared.check(cell, options=Options(streams=in_streams(cell)))
    assert report.ok, report


@pytest.mark.parametrize("cell", selected(both_ways(), chosen(), group))
def test_both_ways(shared: Shared, cell: Cell) -> None:
    with one_core():
        report = shared.check(cell)
    assert report.ok, report


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer()) as made:
        yield made


def cells_on_processes() -> list[Cell]:
    """Every model, every schedule, every kind of ZeRO; on Ray the suite of launchers has some too."""
    found = []
    for i, case in enumerate(zoo.NAMES):
        schedule = list(SHAPES)[(i * 3) % len(SHAPES)]
        cell = Cell(case=case, schedule=schedule, dp=2, zero=i % 4, parts=parts(schedule, 2), rows=1)
        found.append(replace(cell, ways=2) if case_of(cell).experts else cell)
    return found


@pytest.mark.parametrize("cell", selected(cells_on_processes(), cells_on_processes(), group))
def test_processes(forks: ForkServer, shared: Shared, cell: Cell) -> None:
    report = shared.check(cell, lambda program, options: launch_local(program, options, forks))
    assert report.ok, report
