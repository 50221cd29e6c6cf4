"""What docs/stability.md promises: files of released versions are read, and files name their version."""

import json
import re
from pathlib import Path

import pytest

import piper
from piper.checkpoint.huggingface import mark_export
from piper.checkpoint.target import MARK
from piper.directives.json import load_strategy
from piper.errors import deprecated
from piper.version import VERSION
from tests.kept.jobs import STRATEGY, job

ROOT = Path(__file__).parents[1]
KEPT = sorted(path for path in (ROOT / "tests/kept").iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name))
LOSSES = [0.018867500813390177, 0.012763728873654012]  # of the steps after those that were saved


def test_the_changelog_begins_with_this_version_and_its_files_are_kept() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == VERSION == piper.__version__
    assert {path.name for path in KEPT} == set(headings)


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: path.name)
def test_a_strategy_of_a_released_version_is_read_as_the_same_directives(folder: Path) -> None:
    assert load_strategy(folder / "strategy.json") == STRATEGY


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: path.name)
def test_a_checkpoint_of_a_released_version_goes_on(folder: Path) -> None:
    with piper.launch(piper.compile(job()), on="inline", resume=folder / "checkpoint") as run:
        losses = [result.loss for result in run.train(2)]
    assert losses == pytest.approx(LOSSES, rel=1e-12)
    assert json.loads((folder / "checkpoint/checkpoint.json").read_text())["piper"] == folder.name


def test_a_saved_checkpoint_and_an_export_name_this_version(tmp_path: Path) -> None:
    with piper.launch(piper.compile(job()), on="inline") as run:
        run.save(tmp_path / "checkpoint")
    assert json.loads((tmp_path / "checkpoint/checkpoint.json").read_text())["piper"] == VERSION
    mark_export(tmp_path, [])
    assert json.loads((tmp_path / MARK).read_text())["piper"] == VERSION


def test_a_deprecation_says_what_to_use_and_when_the_old_name_goes() -> None:
    with pytest.warns(FutureWarning, match=r"^--to is deprecated and goes in 0\.2: use --format$"):
        deprecated("--to", "--format", gone="0.2")
