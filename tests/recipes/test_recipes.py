"""Every recipe compiles and steps; strategies of one model agree on its losses."""

import random
import sys
from itertools import islice
from pathlib import Path

import pytest

import piper
from piper.recipe import import_file, load_recipe
from piper.run.launch import launch

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = (
    "dense.py:single",
    "dense.py:dp",
    "dense.py:zero",
    "dense.py:pp",
    "experts.py:ep",
    "qwen3_moe.py:ep",
    "moe_dualpipe.py:demo",
    "dualpipe.py:both_ways",
    "tensor.py:tp_dp",
    "tensor.py:sequence",
    "tensor.py:context",
    "tensor.py:four_dimensions",
    "tensor_pairs.py:hidden",
)
ELSEWHERE = {"paper_example.py"}  # beside the paper's own numbers
DENSE = (5.54854, 5.34922)  # the first is about ln 256: a model that knows nothing of bytes


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # recipes add their folder


def losses(name: str, steps: int = 2) -> list[float]:
    job = load_recipe(f"{RECIPES}/{name}")
    program = piper.compile(job)
    with launch(program, on="inline") as run:
        return [run.step(batch).loss for batch in islice(job.data(), steps)]


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_steps(name: str) -> None:
    first, second = losses(name)
    assert 0 < second < first
    if name.startswith(("dense", "tensor")) and name != "tensor.py:context":
        assert (first, second) == pytest.approx(DENSE, rel=1e-5), "whatever the strategy"


def test_every_recipe_is_here() -> None:
    here = {name.partition(":")[0] for name in ALL}
    assert {path.name for path in RECIPES.glob("*.py")} == here | ELSEWHERE


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.name)
def test_a_recipe_is_short(path: Path) -> None:
    assert 10 <= len(path.read_text(encoding="utf-8").splitlines()) <= 42


def test_the_text_is_what_its_grammar_writes() -> None:
    grammar = import_file(RECIPES / "data" / "make_text.py")
    text = (RECIPES / "data" / "text.txt").read_text(encoding="utf-8")
    assert text == grammar.chronicle(random.Random(grammar.SEED))
    assert 60_000 < len(text) < 100_000
