"""The gallery: each recipe is short, its small job has the numbers of one device, its picture is as drawn."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import piper
from piper.check.check import check
from piper.recipe import import_file, load_recipe
from piper.run.launch import launcher

ROOT = Path(__file__).parents[2]
DOCS, GALLERY = ROOT / "docs", ROOT / "recipes" / "gallery"
RECIPES = sorted(path for path in GALLERY.glob("*.py") if path.name != "text.py")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # recipes add their folder
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_at_most_60_lines(recipe: Path) -> None:
    assert len(recipe.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_numbers_of_one_device(recipe: Path) -> None:
    job = load_recipe(f"{recipe}:small")
    program = piper.compile(replace(job, precision="fp64"))
    report = check(program, lambda started, options: launcher(started, "inline", options), list(job.data()))
    assert report.ok, report.first_bad
    assert report.max_loss_diff < 1e-9 and report.max_grad_diff < 1e-9


def test_the_page_has_every_recipe_and_its_lines() -> None:
    assert (DOCS / "published.md").read_text(encoding="utf-8") == script().page(), "run docs/published.py"
    text = (DOCS / "published.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        lines = len(recipe.read_text(encoding="utf-8").splitlines())
        assert f"[`{recipe.name}`](../recipes/gallery/{recipe.name})" in text
        assert re.search(rf"^\| \[`{recipe.name}`\].* \| {lines} \| ", text, re.MULTILINE)
        assert f"pictures/published-{recipe.stem}.svg" in text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_picture_is_as_it_is_drawn(recipe: Path) -> None:
    drawn = (DOCS / "pictures" / f"published-{recipe.stem}.svg").read_text(encoding="utf-8")
    assert drawn == script().picture(recipe), "run docs/published.py, and look at what changed"


def script() -> ModuleType:
    return import_file(DOCS / "published.py")
