"""`piper simulate` as a user calls it."""

import json
import re
from pathlib import Path

import pytest

from piper.cli import main
from tests.test_cli import RECIPE

FIELDS = {
    "schema", "verb", "on", "step_s", "bubble", "samples_per_s", "mfu", "devices", "busy_s", "bubble_s", "bubble_rate", "exposed_s", "communication_s",
    "contention_s", "peak_bytes", "usable_bytes", "at_peak",
    "critical_path",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "net.py"
    path.write_text(RECIPE)
    return path


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["piper", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_report(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "simulate", f"{recipe}:pipeline", "--cluster", "a100") == 0
    text = capsys.readouterr().out
    assert text.startswith("Step ")
    assert " on 4 devices of a100; bubble " in text
    assert re.search(r"; [\d,]+ samples/s, MFU [\d.]+ %$", text.splitlines()[0])
    for heading in ("Exposed communication of", "Live at the peak of", "Why the step is this long"):
        assert heading in text


def test_one_object(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "simulate", f"{recipe}:pipeline", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == FIELDS
    assert told["devices"] == [0, 1, 2, 3]
    assert all(
        len(told[name]) == 4
        for name in FIELDS
        if name.endswith(("_s", "_bytes")) and name not in ("step_s", "samples_per_s")
    )
    assert told["critical_path"][-1]["end_s"] == told["step_s"]
    for busy, bubble in zip(told["busy_s"], told["bubble_s"], strict=True):
        assert busy + bubble == pytest.approx(told["step_s"])


def test_a_long_path_shows_how_it_begins_and_how_it_ends(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("piper.cli.simulate.MOST_STRETCHES", 2)
    assert call(monkeypatch, "simulate", f"{recipe}:pipeline", "--cluster", "a100") == 0
    path = capsys.readouterr().out.partition("Why the step is this long")[2].splitlines()
    first, more, last = path[path.index("", 1) + 1 :]
    assert first.endswith("; begins the step")
    assert re.fullmatch(r"  \.\.\. \d+ stretches more: --json has all nodes", more)
    assert " total" in last


def test_an_unknown_cluster(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "simulate", f"{recipe}:pipeline", "--cluster", "b300") == 2
    assert capsys.readouterr().err == (
        "error: --cluster: there is no cluster 'b300'\n"
        "  known: a100, b200, cpu, h100, h200\n"
        "  hint:  name one of these, or a TOML file; `piper profile --cluster-out FILE` writes one\n"
    )


LENGTHS = """
import torch
from torch import nn
import piper


def net():
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))


def job():
    def rows(samples, length):
        return {"x": torch.zeros(samples, length, 8)}

    return piper.Job(
        model=net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [rows(4, 3), rows(2, 5), rows(4, 4)],
        strategy={4: [piper.replicate(piper.at(), range(2), zero=3)], 6: [piper.replicate(piper.at(), range(2))]},
    )
"""


def test_strategies_by_length_show_each_step_and_the_moves_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(LENGTHS)
    assert call(monkeypatch, "simulate", f"{tmp_path / 'net.py'}:job", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["length"], one["limit"]) for one in told["lengths"]] == [
        (4, 4),
        (5, 6),
    ]  # the longest of each
    there, back = told["moves"]
    assert (there["before"], there["after"]) == (4, 5) == (back["after"], back["before"])
    # Each device has half of 1096 numbers, and gets the other half with two moments of each.
    assert there["bytes"] == 548 * 12 and back["bytes"] == 0
    assert there["seconds"] > back["seconds"] > 0
    # Both layouts in full, because there is one bucket, and as much as is sent and arrives.
    assert 0 <= there["peak_bytes"] - (548 + 1096 + 2 * 548) * 12 < 100  # and constants
    (tmp_path / "small.toml").write_text(
        'memory = 30000\nmemory_bandwidth = 1e9\n[flops]\nfloat32 = 1e9\n[[link]]\nname = "wire"\n'
        "bandwidth = 1e9\nlatency = 1e-6\n"
    )
    words = ("simulate", f"{tmp_path / 'net.py'}:job", "--cluster", str(tmp_path / "small.toml"))
    assert call(monkeypatch, *words) == 0
    text = capsys.readouterr().out
    assert "Moves of the state before a step in another layout" in text
    assert re.search(r"Does not fit: in a move from length 4 to 5 a device would hold .* and may use", text)
