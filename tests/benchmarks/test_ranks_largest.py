"""How `benchmarks/ranks_largest.py` finds the largest microbatch: a line, then steps of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ranks_largest
from benchmarks.ranks_largest import confirmed, largest_on_line
from benchmarks.ranks_rows import RECOMPUTED, SIZES
from benchmarks.ranks_sides import Task, size_of

ROOT = Path(ranks_largest.__file__).parents[1]
TOLERANCE = 2e-5  # of float32 sums in another order, over a few steps


def test_a_line_through_two_sizes_says_the_largest() -> None:
    assert largest_on_line(8.0, {8: 3.0, 16: 5.0}) == 28
    assert largest_on_line(7.9, {16: 5.0, 8: 3.0}) == 27
    assert largest_on_line(8.0, {8: 0.0, 16: 0.0}) is None  # on a host no memory is counted


@pytest.mark.parametrize("guess", [25, 27, 28, 29, 31])
def test_the_largest_is_confirmed_by_the_one_above(guess: int) -> None:
    asked: list[int] = []

    def fits(samples: int) -> bool:
        asked.append(samples)
        return samples <= 28

    assert confirmed(fits, guess) == 28
    assert {28, 29} <= {*asked}


def test_a_guess_that_is_far_off_is_said() -> None:
    assert confirmed(lambda samples: samples <= 28, 20) is None


def test_a_task_may_have_its_own_samples() -> None:
    task = Task(row="largest_zero3", size="small", steps=3, device="cpu", cache="")
    assert size_of(task) is SIZES["small"]
    own = size_of(Task(row="largest_zero3", size="small", steps=3, device="cpu", cache="", samples=31))
    assert own.shapes["largest_zero3"].samples == 31
    assert own.shapes["largest_zero2"] == SIZES["small"].shapes["largest_zero2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_sides_have_the_same_losses_when_layers_save_their_inputs(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--size", "tiny", "--eager", "--measured", "1,2", "--out", str(out)]
    words += ["--rows", ",".join(RECOMPUTED), "--cache", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "benchmarks.ranks_largest", *words], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["row"], line["samples"], line["side"]) for line in lines] == [
        (row, samples, side) for row in RECOMPUTED for samples in (1, 2) for side in ("peer", "piper")
    ]
    for peer, ours in zip(lines[::2], lines[1::2], strict=True):
        assert ours["losses"] == pytest.approx(peer["losses"], rel=TOLERANCE), ours["row"]
