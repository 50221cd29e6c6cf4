"""`piper init` writes a recipe that runs, and `piper --version`."""

import subprocess
import sys
import tomllib
from inspect import cleandoc
from pathlib import Path

import pytest

import piper
from piper.cli import main

ROOT = Path(__file__).parents[1]


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> object:
    """Run the command line in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["piper", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_recipe_gives_the_numbers_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", "mine") == 0
    assert capsys.readouterr().out == cleandoc("""
        Wrote mine.py. Next:
          piper check mine.py:four    the same numbers as one device?
          piper train mine.py:four    trains on four processes of this machine
    """) + "\n"  # fmt: skip
    assert run(monkeypatch, "check", "mine.py:four", "--steps", "1") == 0
    assert capsys.readouterr().out.startswith("The same numbers as one device.\n")


def test_the_recipe_is_formatted_and_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    assert run(monkeypatch, "init", str(path)) == 0
    assert f"piper check {path}:four" in path.read_text()
    ruff = [sys.executable, "-m", "ruff", "--config", str(ROOT / "pyproject.toml")]
    for how in (["check", "--ignore", "E501"], ["format", "--check"]):  # its docstring has the path
        subprocess.run([*ruff[:3], *how, *ruff[3:], str(path)], check=True, timeout=30, capture_output=True)


def test_a_file_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("mine\n")
    assert run(monkeypatch, "init", "mine.py") == 2
    assert (tmp_path / "mine.py").read_text() == "mine\n"
    assert capsys.readouterr().err == cleandoc("""
        error: mine.py: the recipe cannot be written
          why:  File exists
          hint: name a new file in a folder that exists and is yours: init replaces nothing
    """) + "\n"  # fmt: skip


def test_a_folder_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", "there/mine") == 2
    assert capsys.readouterr().err == cleandoc("""
        error: there/mine.py: the recipe cannot be written
          why:  No such file or directory
          hint: name a new file in a folder that exists and is yours: init replaces nothing
    """) + "\n"  # fmt: skip


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == "piper 0.1.0\n"
    assert piper.__version__ == "0.1.0"


def test_nothing_advises_to_install_the_other_project_named_piper() -> None:
    """On PyPI `piper` is another project: ours is distributed under another name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "torch-piper"
    sources = [*(ROOT / "piper").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    forbidden = ("install piper", "install 'piper", 'install "piper')
    found = [str(path) for path in sources if any(text in path.read_text() for text in forbidden)]
    assert not found
