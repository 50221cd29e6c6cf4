"""Compiled chunks on a CUDA device: the numbers of plain PyTorch, whatever is kept and however often compiled."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import piper
from piper.capture.compile.operators import embedding_grad
from piper.capture.compile.tuning import milliseconds
from piper.check.check import check
from piper.compiler import compile
from piper.run.launch import launcher
from tests.runtime.grid import Cell, batches, job, strategy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # each kernel is compiled
TOLERANCE = 1e-6  # of float64: the models' rotations are float32, and a compiled cosine rounds another way
CELLS = [
    Cell(case="decoder", schedule="zero-bubble", parts=4),
    Cell(case="moe", schedule="1f1b", dp=2, ways=2),
    Cell(case="decoder", schedule="1f1b", dp=2, zero=3),  # gradients are written flat
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("budget", [None, 0.3])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_compiled_chunks_give_the_numbers_of_one_device(
    cell: Cell, budget: float | None, cache: Path
) -> None:
    asked = job(cell, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    if budget is not None:
        asked = replace(asked, strategy=[*strategy(cell), piper.remat(piper.at(), budget)])
    program = compile(asked, device="cuda", compile=True, cache=cache)
    report = check(
        program, lambda started, options: launcher(started, "inline", options), batches(cell, 2), TOLERANCE
    )
    assert report.ok, report


def test_attention_is_made_again_where_nothing_is_to_be_kept() -> None:
    asked = job(Cell(case="decoder", schedule="1f1b", parts=2), precision="bf16")
    asked = replace(asked, strategy=[*asked.strategy, piper.remat(piper.at(), 0.0)])  # type: ignore[misc]
    program = compile(asked, device="cuda", compile=True)
    first = program.outline.chunks[0]
    assert not first.saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 64 * 1024])
def test_the_gradient_of_a_table_is_exact_to_a_rounding(length: int, dtype: torch.dtype) -> None:
    rows = torch.randint(length, (8, 128), device="cuda")
    grad = torch.randn(8, 128, 32, device="cuda").to(dtype)
    found = embedding_grad(grad, rows, length, 5, False)
    exact = torch.ops.aten.embedding_dense_backward.default(grad.double(), rows, length, 5, False)
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_the_time_of_a_kernel_leaves_out_that_of_its_launch() -> None:
    values = torch.zeros(2**20, device="cuda")

    def launch() -> None:
        time.sleep(0.002)  # a slow host
        values.add_(1)

    assert 0 < milliseconds(launch) < 1
