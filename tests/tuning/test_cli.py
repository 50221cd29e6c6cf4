"""`piper tune` from the command line: a strategy file that check, plan and simulate take."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import piper
from piper.cli import app_with
from piper.cli.tune import read_size, write_new
from piper.errors import ConfigError
from piper.tuning.evaluate import Evaluation, Leaf
from piper.tuning.strategy_search import StrategySearch

RECIPE = """
import torch
from torch import nn
import piper


def job():
    x = torch.zeros(4, 8)
    return piper.Job(
        model=lambda: piper.annotate_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": x}],
    )
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "net.py").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "net.py:job"


def test_from_a_recipe_to_a_strategy_that_checks(recipe: str) -> None:
    asked = ["tune", recipe, "--cluster", "h100", "--devices", "2", "--trials", "4"]
    files = ["--out", "best.json", "--python", "best.py"]
    done = CliRunner().invoke(app_with(), [*asked, *files, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["best"]["strategy"] == json.loads(Path("best.json").read_text(encoding="utf-8"))
    assert found["best"]["peak_bytes"] <= found["limit_bytes"] == 76_824_000_000
    assert found["evaluated"] == len(found["ranked"])
    assert found["best"]["step_s"] == min(one["step_s"] for one in found["ranked"])
    assert {"seconds", "front", "losers"} <= found.keys()
    space: dict[str, object] = {}
    exec(Path("best.py").read_text(encoding="utf-8"), space)
    assert space["STRATEGY"] == piper.directives.json.load_strategy(Path("best.json"))
    again = ["--start", "best.json", "--trials", "1", "--json"]
    done = CliRunner().invoke(app_with(), [*asked, *again], catch_exceptions=False)
    assert json.loads(done.stdout)["best"]["label"] == "the given strategy"
    for verb in (["check", recipe], ["plan", recipe], ["simulate", recipe]):
        done = CliRunner().invoke(app_with(), [*verb, "--strategy", "best.json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output


def test_ctrl_c_prints_the_best_so_far(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = StrategySearch.evaluate

    def until_the_second(
        search: StrategySearch, leaf: Leaf, following: Callable[[], Iterable[Leaf]] = tuple
    ) -> Evaluation | None:
        found = evaluate(search, leaf, following)
        if len(search.evaluated) == 2:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(StrategySearch, "evaluate", until_the_second)
    asked = ["tune", recipe, "--cluster", "h100", "--devices", "2", "--out", "best.json"]
    done = CliRunner().invoke(app_with(), asked, catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Best: ")
    assert re.search(r"microbatch(es)? of \d+; [\d,]+ samples/s, MFU [\d.]+ %$", lines[1])
    assert lines[2].startswith("  2 candidates compiled in ")
    assert lines[2].endswith(" s; interrupted, so a shorter one may be left")
    assert lines[-1] == "best.json: piper check net.py:job --strategy best.json"
    assert json.loads(Path("best.json").read_text(encoding="utf-8"))


TERMINAL = """
import os, signal, time
from piper.cli import main
from piper.tuning import strategy_search

together = strategy_search.run_together


def interrupt():
    os.killpg(0, signal.SIGINT)  # what a terminal does
    time.sleep(60)


def interrupted(calls):
    return together([interrupt, *calls[1:]] if len(calls) > 1 else calls)


strategy_search.run_together = interrupted
main()
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_all_processes(recipe: str) -> None:
    asked = ["tune", recipe, "--cluster", "h100", "--devices", "2", "--workers", "3"]
    started = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own
    )
    printed, errors = started.communicate(timeout=300)
    assert (started.returncode, errors) == (0, "")
    assert "; interrupted, so a shorter one may be left" in printed
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)


def test_a_file_that_exists_is_not_replaced(recipe: str) -> None:
    Path("best.json").write_text("[]", encoding="utf-8")
    asked = ["tune", recipe, "--cluster", "h100", "--devices", "2", "--out", "best.json"]
    done = CliRunner().invoke(app_with(), asked)
    assert str(done.exception).startswith("best.json: this file exists\n")
    assert Path("best.json").read_text(encoding="utf-8") == "[]"


def test_a_file_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match=r"/proc/best\.json: the strategy cannot be written\n  why: "):
        write_new(Path("/proc/best.json"), "[]")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("74GiB", 74 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("512MiB", 512 * 2**20),
        ("4096", 4096),
        ("10B", 10),
        ("10iB", 10),
        ("2T", 2 * 10**12),
    ],
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert read_size(text) == nbytes


@pytest.mark.parametrize("text", ["much", "-3GiB", "0", "GiB"])
def test_what_is_not_an_amount(text: str) -> None:
    with pytest.raises(piper.ConfigError, match="is not an amount of memory"):
        read_size(text)
