"""Batches of several shapes under composed strategies: the numbers of one device, uneven batches included."""

from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from piper.check.check import check
from piper.compiler import compile
from piper.directives import Directive, place, replicate, split
from piper.ir.select import at
from piper.run.launch import launch_inline
from tests.runtime import divided, grid
from tests.runtime.grid import Cell

CELLS = [
    Cell(case="moe", dp=2, ways=2, zero=1),
    Cell(case="encoder_decoder", dp=2, zero=2),
    Cell(case="decoder", schedule="zbv", dp=2, zero=3, parts=4, rows=1),
    Cell(case="decoder", schedule="zero-bubble", clip=0.1),
]
DIVIDED = [
    ("decoder", "sp2"),
    ("decoder", "cp2zigzag"),
    ("decoder", "tp2dp2z3"),
    ("decoder", "tp2cp2dp2"),
    ("moe", "tp2ep2"),
    ("qwen3", "tp2pp2"),
]
SETS: Mapping[str, Sequence[Directive]] = {  # sets of devices of different sizes
    "2 to 4": [replicate(at(PP=0), [0, 1], zero=1), replicate(at(PP=1), [2, 3, 4, 5], zero=3)],
    "4 to 2": [replicate(at(PP=0), [0, 1, 2, 3], zero=2), replicate(at(PP=1), [4, 5])],
    "4 to 1": [replicate(at(PP=0), [0, 1, 2, 3], zero=3), place(at(PP=1), [0])],
}
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]


def cut(batch: Mapping[str, Tensor], samples: int, length: int | None = None) -> dict[str, Tensor]:
    return {name: value[:samples, :length] if length else value[:samples] for name, value in batch.items()}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_uneven_batches(cell: Cell) -> None:
    first, second = grid.batches(cell, 2)
    samples = len(next(iter(first.values())))
    report = check(compile(grid.job(cell)), launch_inline, [first, cut(second, samples - 1), cut(first, 1)])
    assert report.ok, report


@pytest.mark.parametrize(("model", "strategy"), DIVIDED)
def test_lengths_and_uneven_batches_of_divided_models(model: str, strategy: str) -> None:
    first, second = divided.batches(2)
    given = [first, cut(second, 3, 8)]
    if (model, strategy) == DIVIDED[0]:  # each shape costs a capture: the others differ in both at once
        given += [cut(first, 5), cut(second, 8, 8)]
    report = check(compile(divided.job(model, strategy), device="cpu"), launch_inline, given)
    assert report.ok, report


@pytest.mark.parametrize("name", SETS)
def test_uneven_batches_between_sets_of_devices(name: str) -> None:
    cell = Cell(case="mlp")
    batch = grid.case_of(cell).batch(8, 0)
    made = grid.job(cell, strategy=[*SETS[name], split(at(), parts=2)], data=lambda: [batch])
    report = check(compile(made), launch_inline, [batch, *(cut(batch, size) for size in (7, 5, 3, 1))])
    assert report.ok, report


def test_an_optimizer_that_needs_whole_parameters() -> None:
    cell = Cell(case="decoder_untied", dp=2, zero=3)
    first, second = grid.batches(cell, 2)

    def muon(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Muon([tensor for tensor in params if tensor.dim() == 2], lr=0.01)

    report = check(compile(grid.job(cell, optimizer=muon)), launch_inline, [first, cut(second, 3)])
    assert report.ok, report
