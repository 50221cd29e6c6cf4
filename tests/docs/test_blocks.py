"""Every code block of README and of the documentation does what the page says."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from piper.capture.shard.rules import RULES
from tests.docs.blocks import blocks_of, pages, saved_before
from tests.docs.running import Reader
from tests.runtime.sharing import Shared

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages(ROOT)}


@pytest.fixture
def folder(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the recipes and what lies beside the page; what is imported there is forgotten after."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / page).parent.glob("*.py"):
        shutil.copyfile(file, tmp_path / file.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # piper, torchrun
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.timeout(600)  # the tutorial compiles ten jobs; others start torchrun
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, folder: Path) -> None:
    reader = Reader(Path(page).name)
    # Commands of a page read its recipes again, and compile the same models. A rule that it registers ends with it.
    with Shared().capturing(), patch.dict(RULES):
        for block in (*saved_before(ROOT / page), *blocks_of(PAGES[page], Path(page).name)):
            reader.follow(block)
    reader.finish()
