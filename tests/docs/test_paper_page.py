"""The page about the paper's results holds the figures of the results file, and its pictures show them."""

import re
from pathlib import Path

from piper.recipe import import_file

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "results" / "paper.md").read_text(encoding="utf-8")
MEASURED = "".join(
    (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    for name in ("gpu_overlap.txt", "gpu_fits.txt")
)
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
PUBLISHED = {"1.13x", "1.46x", "8x", "3.3x"}  # by the paper


def test_the_page_and_its_pictures_are_as_they_are_made() -> None:
    made: dict[str, str] = import_file(ROOT / "docs" / "paper.py").files()
    assert {name for name in made if name.endswith(".svg")} == {
        f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").glob("paper-*.svg")
    }
    stale = [name for name, text in made.items() if (ROOT / "docs" / name).read_bytes() != text.encode()]
    assert not stale, "run `python docs/paper.py`, and look at what changed"


def test_every_ratio_and_row_of_the_page_is_one_of_the_results() -> None:
    """This reads the page without the code that makes it."""
    ratios = set(re.findall(r"\b\d+(?:\.\d+)?x\b", PAGE))
    assert ratios - set(re.findall(r"\b\d+(?:\.\d+)?x\b", RESULTS + MEASURED)) <= PUBLISHED
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [\w.]+ \|", line) and line.count("|") > 5]
    assert len(rows) > 50
    assert set(rows) <= set(RESULTS.splitlines())


def test_the_results_of_a_script_are_of_one_commit() -> None:
    """The largest microbatches, which have a script of their own, and the sweep may be of another commit."""
    commits = dict(re.findall(r"^## (\w+)\n\n```text\n.*\ncommit: +(\w+)$", RESULTS, re.MULTILINE))
    assert len(commits) == RESULTS.count("\n## ") >= 6
    assert commits.pop("batch") == commits.pop("peer")
    assert commits.pop("sweep")
    assert len(set(commits.values())) == 1
