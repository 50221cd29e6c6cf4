"""`replicate(..., keep="step")`: parameters stay gathered and gradients whole until their last use in a step."""

from collections import Counter
from dataclasses import replace

import pytest

from piper.check.check import check
from piper.run.launch import launch_inline
from tests.runtime.grid import Cell, batches, compiled

CELLS = [
    Cell(
        case="decoder_untied", schedule="1f1b", dp=2, zero=3, parts=4, clip=0.3, bucket_mb=0.02, keep="step"
    ),
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=2, parts=4, keep="step"),
    Cell(case="decoder", schedule="zbv", dp=2, zero=3, parts=4, clip=0.3, keep="step"),
    Cell(case="mlp", schedule="dualpipe", dp=2, zero=3, parts=4, keep="step"),
    Cell(case="moe", schedule="interleaved-1f1b", dp=2, zero=3, parts=4, ways=2, keep="step"),
    Cell(case="mlp", schedule="none", dp=3, zero=3, parts=1, keep="step"),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_numbers_of_one_device(cell: Cell) -> None:
    report = check(compiled(cell), launch_inline, batches(cell, 3))
    assert report.ok, report


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_bucket_travels_once_a_step(cell: Cell) -> None:
    """Microbatches that go both ways run on two sets of devices: each may ask for the bucket once."""
    most = 2 if cell.schedule == "dualpipe" else 1
    plans = compiled(cell).plans
    for plan in plans:
        travels = Counter(
            (instr.op, instr.payload.bucket)  # type: ignore[union-attr]
            for instr in plan.instrs
            if instr.op in ("gather", "reduce_scatter")
        )
        assert travels
        assert all(count <= most for count in travels.values()), travels


@pytest.mark.parametrize("op", ["gather", "reduce_scatter"])
def test_without_it_each_microbatch_gathers_and_reduces(op: str) -> None:
    """The same job, so that the test above can fail."""
    cell = replace(CELLS[2], keep="use")
    each, once = (
        sum(instr.op == op for plan in compiled(asked).plans for instr in plan.instrs)
        for asked in (cell, CELLS[2])
    )
    assert each > 2 * once
