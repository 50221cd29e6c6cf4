"""Compiled chunks in whole runs: compiled by the driver, loaded by every worker, the numbers of one device."""

from pathlib import Path

import pytest

from piper.capture.compile.flat_gradients import FlatPhase
from piper.capture.compile.inductor import Compiled
from piper.check.check import check
from piper.compiler import compile
from piper.run.launch import launcher
from tests.runtime.grid import Cell, batches, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # a compiler for C++ is at work
CELLS = [
    Cell(case="mlp", schedule="zero-bubble", dp=2, zero=3),
    Cell(case="dropout", schedule="1f1b"),  # draws the numbers that it draws when it is not compiled
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("on", ["inline", "local"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_compiled_runs_give_the_numbers_of_one_device(cell: Cell, on: str, cache: Path) -> None:
    program = compile(job(cell), device="cpu", compile=True, cache=cache)
    report = check(
        program, lambda started, options: launcher(started, on, options), batches(cell, 2), tol=1e-9
    )
    assert report.ok, report
    used = [code for captured in program.codes.values() for code in captured.built.values()]
    assert any(isinstance(code, Compiled) for code in used)
    assert any(isinstance(code, FlatPhase) for code in used)
    assert any(ins.adds_to for plan in program.plans.plans for ins in plan.instrs)
