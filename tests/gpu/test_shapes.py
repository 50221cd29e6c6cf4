"""Batches of several shapes on CUDA: the numbers of one device, with and without graphs."""

import pytest

from piper.compiler import compile
from piper.launchers.inline import launch_inline
from piper.launchers.local import launch_local
from piper.runtime.debug.check import check
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CELLS = [
    Cell(case="decoder", schedule="none", parts=2, clip=0.3),
    Cell(case="convnet", schedule="none", parts=2),  # buffers that every shape writes
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_several_shapes_equal_one_device(cell: Cell, graphs: bool) -> None:
    """The steps of other shapes come between those of a graph, which goes on with what they leave."""
    sizes = (4, 4, 4, 2, 4, 3, 4, 4)
    given = [
        {name: value[:size] for name, value in batch.items()}
        for size, batch in zip(sizes, batches(cell, len(sizes)), strict=True)
    ]
    report = check(compile(job(cell)), launch_inline, given, options=Options(graphs=graphs))
    assert report.ok, report


def test_processes_train_on_several_shapes() -> None:
    cell = Cell(case="decoder", dp=2, zero=3, rows=1)
    first, second = batches(cell, 2)
    given = [first, {name: value[:3] for name, value in second.items()}, second]
    report = check(compile(job(cell)), launch_local, given)
    assert report.ok, report
