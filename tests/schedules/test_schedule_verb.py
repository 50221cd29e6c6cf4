"""`piper schedule`: what it prints for synthesised schedules, and what it refuses."""

import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.cli import main
from piper.schedules.timing import makespan
from piper.schedules.torch_csv import parse_csv
from tests.schedules.activations import peak_activations

Piper = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piper(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Piper:
    """The command line in this process: exit status, output, errors."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["piper", "schedule", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


SIZE = ("--ranks", "4", "--microbatches", "8")


def test_a_synthesised_schedule_and_how_good_it_is(piper: Piper) -> None:
    code, shown, _ = piper("synthesised", "--ranks", "2", "--microbatches", "2", "--stages-per-rank", "1")
    assert code == 0
    assert shown == (
        cleandoc("""
            rank 0  0F0 0F1 .   0B0 --  0B1 --
            rank 1  .   1F0 1I0 1F1 1I1 1W0 1W1

            makespan 7, the bound: none is shorter; a rank holds at most 2 forwards, 1.00 of 1F1B's 2
        """)
        + "\n"
    )


def test_csv_is_the_schedule_and_nothing_else(piper: Piper) -> None:
    code, shown, _ = piper("synthesised", *SIZE, "--stages-per-rank", "4", "--csv")
    grid = parse_csv(shown, by="the command line")
    assert (code, makespan(grid), max(peak_activations(grid))) == (0, 99, 16)


def test_memory_is_a_share_of_1f1b(piper: Piper) -> None:
    _, shown, _ = piper("synthesised", *SIZE, "--memory", "0.75", "--csv")
    grid = parse_csv(shown, by="the command line")
    assert (makespan(grid), max(peak_activations(grid))) == (53, 6)


def test_costs_and_a_slower_last_stage(piper: Piper) -> None:
    _, shown, _ = piper("synthesised", *SIZE, "--last", "1.5")
    assert "makespan 60, the bound: none is shorter" in shown
    _, shown, _ = piper("synthesised", "--ranks", "1", "--microbatches", "1", "--costs", "1,2,0.5")
    assert shown.splitlines()[0] == ("rank 0  0F0 --  1F0 --  1B0 --  --  --  --  0B0 --  --  --  --")


def test_a_picture_of_a_synthesised_schedule(piper: Piper, tmp_path: Path) -> None:
    path = tmp_path / "drawn.svg"
    code, _, _ = piper(
        "synthesised", "--ranks", "2", "--microbatches", "2", "--last", "1.5", "--svg", str(path)
    )
    assert code == 0 and path.read_text().startswith("<svg")


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_v_half_and_v_min_by_name(piper: Piper, name: str) -> None:
    code, shown, _ = piper(name, *SIZE, "--csv")
    grid = parse_csv(shown, by="the command line")
    assert (code, makespan(grid)) == (0, {"v-half": 53, "v-min": 59}[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("zbv", *SIZE, "--memory", "0.5"),
            "piper schedule: zbv does not take --memory\n  hint: leave it out, or use synthesised",
        ),
        (
            ("synthesised", *SIZE, "--costs", "1,1"),
            "piper schedule: --costs 1,1 is not three numbers\n"
            "  hint: give the times of F, I and W: --costs 1,1,1",
        ),
        (
            ("synthesised", *SIZE, "--costs", "1,nan,1"),
            "synthesised: costs=nan\n  hint: costs takes numbers above 0, none infinite or NaN",
        ),
        (
            ("synthesised", *SIZE, "--memory", "0.1"),
            "synthesised: memory=0.1 holds no whole microbatch\n"
            "  needs: at least 0.25 of 1F1B's 8 forwards\n  hint:  raise the memory, or use more ranks",
        ),
        (
            ("synthesised", "--ranks", "0", "--microbatches", "8"),
            "synthesised: ranks must be a whole number from 1, got 0\n  hint: ranks=1 is the least",
        ),
    ],
)
def test_what_is_refused(piper: Piper, words: tuple[str, ...], message: str) -> None:
    assert piper(*words) == (2, "", f"error: {message}\n")
