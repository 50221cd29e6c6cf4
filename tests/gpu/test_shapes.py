"""Batches of several shapes on CUDA: the numbers of one device, with and without graphs."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

import piper
from piper.check.check import check
from piper.compiler import compile
from piper.run.launch import launch_inline, launch_local
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CELLS = [
    Cell(case="decoder", schedule="none", parts=2, clip=0.3),
    Cell(case="convnet", schedule="none", parts=2),  # buffers that every shape writes
]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def halves(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """A rate that single precision holds as it is: graphs keep it so."""
    return torch.optim.AdamW(params, lr=2**-7)


def given(cell: Cell) -> list[dict[str, Tensor]]:
    """Batches of four samples, with shorter ones between them."""
    sizes = (4, 4, 4, 2, 4, 3, 4, 4)
    return [
        {name: value[:size] for name, value in batch.items()}
        for size, batch in zip(sizes, batches(cell, len(sizes)), strict=True)
    ]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_several_shapes_equal_one_device(cell: Cell) -> None:
    report = check(compile(job(cell), device="cuda"), launch_inline, given(cell))
    assert report.ok, report


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_graph_goes_on_with_what_other_shapes_leave(cell: Cell, deterministic: None) -> None:
    asked = job(cell, strategy=[piper.split(piper.at(), parts=cell.parts)], optimizer=halves)
    program = compile(asked, device="cuda")
    losses = []
    for options in (Options(graphs=True), Options()):
        with launch_inline(program, options) as run:
            losses.append([run.step(batch).loss for batch in given(cell)])
    assert losses[0] == losses[1]


def test_processes_train_on_several_shapes() -> None:
    cell = Cell(case="decoder", dp=2, zero=3, rows=1)
    first, second = batches(cell, 2)
    shapes = [first, {name: value[:3] for name, value in second.items()}, second]
    report = check(compile(job(cell), device="cuda"), launch_local, shapes)
    assert report.ok, report
