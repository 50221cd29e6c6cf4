"""The notebooks are valid documents, and show what their cells give."""

import json
from pathlib import Path

import nbformat
import pytest

from piper.capture.compile.cache import Cache
from piper.capture.layers.short import short_capturing
from piper.capture.recordings import Capturing, Recordings
from piper.compiler import build
from piper.job import Batch
from piper.recipe import import_file

NOTEBOOKS = import_file(Path(__file__).parents[2] / "docs" / "notebooks" / "run.py")
PATHS: list[Path] = NOTEBOOKS.notebooks()
names = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])
SMALL = [
    {"cell_type": "markdown", "source": ["# A page\n", "[b](b.md)"]},
    {"cell_type": "code", "source": ["x = 2\n", "print(x)"]},
    {"cell_type": "code", "source": ["x + 1"]},
]


@names
def test_a_notebook_is_a_valid_document(path: Path) -> None:
    nbformat.validate(json.loads(path.read_text(encoding="utf-8")))


@pytest.fixture
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compilations trace few of a model's equal layers: `tests/capture/test_short.py` compares the outlines."""
    known: dict[int, Capturing] = {}

    def short_or_known(batch: Batch, recordings: Recordings, cache: Cache | None = None) -> Capturing:
        assert cache is None
        if id(recordings) not in known:
            short = short_capturing(Capturing(batch=batch, recordings=recordings), 1)
            assert short.recordings is not recordings, "all layers would be traced"
            known[id(recordings)] = known[id(short.recordings)] = short
        return known[id(recordings)]

    monkeypatch.setattr(build, "Capturing", short_or_known)


@names
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("short_traces")
def test_a_notebook_shows_what_its_cells_give(path: Path) -> None:
    assert_shows_what_its_cells_give(path)


@names
@pytest.mark.slow
@pytest.mark.timeout(600)  # it takes under two minutes of a core, most of it for one trace
def test_a_notebook_that_traces_all_layers_shows_the_same(path: Path) -> None:
    assert_shows_what_its_cells_give(path)


def assert_shows_what_its_cells_give(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert NOTEBOOKS.executed(text, path.stem) == text, "run `make notebooks`"


def test_cells_run_in_order_and_become_a_page() -> None:
    text = NOTEBOOKS.executed(json.dumps({"cells": SMALL}), "small")
    cells = json.loads(text)["cells"]
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2]
    assert cells[1]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["2\n"]}]
    assert cells[2]["outputs"][0]["data"] == {"text/plain": ["3"]}
    assert NOTEBOOKS.markdown(text) == (
        "# A page\n[b](b.md)\n\n```python\nx = 2\nprint(x)\n```\n\n```text\n2\n\n```\n\n"
        "```python\nx + 1\n```\n\n```text\n3\n```\n"
    )
