"""Every model under every schedule, with replicas, shards and experts of each kind: the numbers of one device.

Slices are of a single sample; cells alternate between clipping and not, between streams and one line, between optimizers,
between flat and grouped replicas, and for one model between masks. In all
cells together any three of the model, the schedule, the number of replicas and the kind of ZeRO meet, in the matrix
any two.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from piper.errors import PiperError
from piper.run.launch import launch_local
from piper.runtime.worker import Options
from piper.workers.transport.fork_server import ForkServer
from tests import zoo
from tests.covering import Choices, covering, selected
from tests.limits import limit_of
from tests.runtime.grid import OPTIMIZERS, SHAPES, Cell, case_of
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


def with_more(cell: Cell, model: int, schedule: int) -> Cell:
    """Give a cell an optimizer, a mask, and groups of its replicas, in other pairs for the next model and schedule."""
    optimizer = list(OPTIMIZERS)[(model + schedule + cell.zero) % len(OPTIMIZERS)]
    mask = ("", "padding", "documents")[schedule % 3] if cell.case == "llama_hf" else ""
    groups = cell.dp == 4 and cell.zero > 0 and model % 2 == 0
    owners = groups and cell.zero == 3 and model % 4 == 0
    return replace(
        cell,
        optimizer=optimizer,
        mask=mask,
        within=2 if groups else None,
        optimizer_within=4 if owners else None,
    )


def capacity(ways: int, number: int) -> float | None:
    """No blocks of rows, blocks that rows often exceed, blocks for any rows."""
    return (None, 1, ways)[number % 3]


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
                cell = with_more(cell, i, j)
                found.append(cell)
                if case_of(cell).experts and dp % 2 == 0:
                    ways = 4 if dp == 4 and (number + j) % 2 else 2
                    found.append(replace(cell, ways=ways, capacity=capacity(ways, i + j + number)))
    order = [*HEAVY, *(name for name in zoo.NAMES if name not in HEAVY)]
    return sorted(found, key=lambda cell: (order.index(cell.case), -case_of(cell).stages))


def in_streams(cell: Cell) -> bool:
    """Return whether a cell's communication runs on streams of its own."""
    return cell.schedule in SHAPES and (list(SHAPES).index(cell.schedule) + cell.dp) % 2 == 0


def both_ways() -> Iterator[Cell]:
    """DualPipe: each stage on two ranks, its parameters on both, with the experts whole and divided."""
    for i, case in enumerate(zoo.NAMES):
        for dp, zero in [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)]:
            clip = 0.3 if dp == zero else None
            cell = Cell(case=case, schedule="dualpipe", dp=dp, zero=zero, parts=4, rows=1, clip=clip)
            cell = with_more(cell, i, len(SHAPES))
            yield cell
            if dp > 1 and case_of(cell).experts:
                yield replace(cell, ways=2, capacity=capacity(2, i + zero))


def choices(cell: Cell) -> Choices:
    """Return what a cell chooses on each axis of the matrix."""
    axes = ("case", "schedule", "dp", "zero", "ways", "clip", "optimizer", "mask")
    named = {name: getattr(cell, name) for name in axes}
    room = cell.capacity and cell.capacity / cell.ways
    return named | {"streams": in_streams(cell), "mesh": (cell.within, cell.optimizer_within), "room": room}


@cache
def chosen() -> list[Cell]:
    """Return cells in which every two values of two axes meet. Where several do, two replicas are preferred.

    The order is drawn: with this one the cells need 39 captures (by model, stages, mask and ways to divide experts), with others
    up to 45. What is refused shows nothing else: values meet there that meet nowhere else.
    """
    every = [*cells(), *both_ways()]
    Random(118).shuffle(every)
    every.sort(key=lambda cell: abs(cell.dp - 2))
    right = covering([cell for cell in every if limit_of(cell) is None], choices)
    return [*right, *covering([cell for cell in every if limit_of(cell) is not None], choices, given=right)]


@pytest.fixture(scope="session")
def shared() -> Shared:
    return Shared()


def right_or_listed(shared: Shared, cell: Cell, options: Options | None = None) -> None:
    """A cell has the numbers of one device, or is refused as the page of limits says."""
    limit = limit_of(cell)
    if limit is not None:
        with pytest.raises(PiperError, match=limit.message):
            shared.compile(cell)
        return
    with one_core():
        report = shared.check(cell, options=options)
    assert report.ok, report


@pytest.mark.parametrize("cell", selected(cells(), chosen()))
def test_cell(shared: Shared, cell: Cell) -> None:
    right_or_listed(shared, cell, Options(streams=in_streams(cell)))


@pytest.mark.parametrize("cell", selected(both_ways(), chosen()))
def test_both_ways(shared: Shared, cell: Cell) -> None:
    right_or_listed(shared, cell)


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


@pytest.mark.parametrize("cell", selected(cells_on_processes(), cells_on_processes()))
def test_processes(forks: ForkServer, shared: Shared, cell: Cell) -> None:
    report = shared.check(cell, lambda program, options: launch_local(program, options, forks))
    assert report.ok, report
