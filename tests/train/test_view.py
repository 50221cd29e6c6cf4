"""`piper view` and `piper diff` of a run: as with its recipe, also when that is gone or has changed."""

import json
from pathlib import Path

import pytest

from piper.cli import main
from tests.train.conftest import Piper, command


@pytest.fixture
def recipe(recipe: Path, tmp_path: Path) -> Path:
    """The recipe as a file that a test may lose."""
    mine = tmp_path / "net.py"
    mine.write_text(recipe.read_text())
    return mine


def call(*words: str) -> None:
    with command(list(words)):
        try:
            main()
        except SystemExit as end:
            assert not end.code


def page(folder: str) -> str:
    call("view", folder, "--out", "page.html")
    return Path("page.html").read_text(encoding="utf-8")


def facts(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text.partition('id="facts">')[2].partition("</script>")[0])
    return found


@pytest.mark.parametrize("profiled", [True, False], ids=["profiled", "plain"])
def test_the_page_of_a_run_needs_no_recipe(piper: Piper, recipe: Path, profiled: bool) -> None:
    assert piper("net.py:job", "--out", "run", *(["--profile", "3"] if profiled else [])).returncode == 0
    text = recipe.read_text()
    recipe.unlink()
    told = facts(page("run"))
    assert (told["title"], told["source"]) == ("net.py:job", text)
    assert told["clock"] == "cpu"  # of the run
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert told["losses"] == {key: [one[key] for one in metrics] for key in ("step", "loss")}
    assert any(told["origins"])  # type: ignore[arg-type]


def test_a_profile_of_an_earlier_layout_keeps_what_made_it(piper: Piper, recipe: Path) -> None:
    assert piper("net.py:job", "--out", "run", "--steps", "5", "--profile", "3").returncode == 0
    first = page("run")
    assert piper("net.py:other_layout", "--out", "run", "--resume").returncode == 0
    recipe.unlink()
    then, now = facts(first), facts(page("run"))
    assert then.pop("losses") != now.pop("losses")  # which go on
    assert now == then


def test_two_runs_are_compared_in_seconds(
    piper: Piper, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piper("net.py:job", "--out", "a", "--steps", "1").returncode == 0
    assert piper("net.py:other_layout", "--out", "b", "--steps", "1").returncode == 0
    recipe.unlink()
    call("diff", "a", "b", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["clock"] == "h100"
    assert 0 < told["b"]["step"] < 1
