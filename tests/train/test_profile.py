"""`train --profile`: what it records and leaves, what `piper profile` makes of it, and what is refused."""

import json
import sys
from pathlib import Path

import pytest

from piper.cli import main
from piper.simulate.profile import read_profile
from tests.train.conftest import Piper


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["piper", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def profiled(piper: Piper, recipe: Path, tmp_path: Path) -> Path:
    done = piper(f"{recipe}:job", "--profile", "3", "--out", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Profile in run/profile: piper profile run\n" in done.stdout
    return tmp_path / "run"


def test_a_profile_has_a_span_for_each_instruction_of_each_device(profiled: Path) -> None:
    names = sorted(path.name for path in (profiled / "profile").iterdir())
    assert names == [
        "device-0.json",
        "device-1.json",
        "device-2.json",
        "plan.txt",
        "profile.json",
        "trace.json",
        "view.json",
    ]
    profile = read_profile(profiled)
    assert (profile.count, profile.first, profile.on, profile.accelerator) == (3, 3, "inline", "cpu")
    for device, timeline in profile.timelines().items():
        plan = profile.plans.of(device)
        assert len(timeline.spans) == len(plan.instrs)
        ended: dict[str, float] = {}
        for ins, span in zip(plan.instrs, timeline.spans, strict=True):
            assert span.start <= span.end and span.waited >= 0
            assert span.start - span.waited >= ended.get(ins.stream, 0.0) - 1e-6, "a stream runs in order"
            ended[ins.stream] = span.end
    trace = json.loads((profiled / "profile" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}


def test_the_table_the_costs_and_the_simulation(
    profiled: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = profiled / "costs.json"
    assert call(monkeypatch, "profile", str(profiled), "--calibrate", str(costs)) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Costs in {costs}: piper simulate RECIPE --costs {costs}\n")
    assert "Steps 3 to 5 on 3 devices (inline): median " in text
    assert "\nop " in text and "\nF[PP=0 MB=*]" in text
    assert call(monkeypatch, "profile", str(profiled), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in told["ops"]} >= {
        "compute",
        "send",
        "recv",
        "gather",
        "reduce_scatter",
        "update",
    }
    assert len(told["step_s"]) == 3
    assert call(monkeypatch, "simulate", f"{recipe}:job", "--costs", str(costs), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on"] == str(costs) and found["step_s"] > 0


def test_costs_of_another_model(
    profiled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    assert call(monkeypatch, "profile", str(profiled), "--calibrate", str(costs)) == 0
    mine = json.loads(costs.read_text())["model"]
    other = tmp_path / "other.py"
    other.write_text(
        "import torch, piper\n"
        "def job():\n"
        "    return piper.Job(model=lambda: torch.nn.Linear(4, 4), data=lambda: [{'x': torch.ones(4, 4)}],\n"
        "                     loss=lambda model, batch: model(batch['x']).mean())\n"
    )
    capsys.readouterr()
    assert call(monkeypatch, "simulate", f"{other}:job", "--costs", str(costs)) == 2
    error = capsys.readouterr().err
    theirs = error.splitlines()[2].split()[-1]
    assert error == (
        f"error: {costs}: these costs were measured on another model\n"
        f"  costs:  model {mine}\n"
        f"  recipe: model {theirs}\n"
        "  hint:   profile this model: piper train RECIPE --profile 5 --out DIR, then "
        "piper profile DIR --calibrate FILE\n"
    )


def test_a_recipe_is_run_to_be_profiled(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "profile", f"{recipe}:unsaved", "--on", "inline", "--steps", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["devices"], len(told["step_s"])) == ([0], 2)
    assert (tmp_path / "runs" / "net-unsaved" / "profile" / "trace.json").is_file()


def test_more_steps_than_the_run_has(piper: Piper, recipe: Path) -> None:
    done = piper(f"{recipe}:job", "--profile", "5")
    assert (done.returncode, done.stderr) == (
        2,
        "error: piper train: --profile 5 needs 7 steps\n"
        "  run:   6 steps to take\n"
        "  first: 2 steps pass before the recording begins\n"
        "  hint:  train longer with --steps, or record less\n",
    )


def test_more_steps_than_a_resumed_run_has_left(piper: Piper, recipe: Path) -> None:
    piper(f"{recipe}:job", "--steps", "4")
    done = piper(f"{recipe}:job", "--resume", "--profile", "3")
    assert (done.returncode, done.stderr) == (
        2,
        "error: piper train: --profile 3 needs 5 steps\n"
        "  run:   2 steps to take\n"
        "  first: 2 steps pass before the recording begins\n"
        "  hint:  train longer with --steps, or record less\n",
    )


def test_a_run_that_is_stopped_keeps_what_was_recorded(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    done = piper(f"{recipe}:interrupted", "--profile", "4", "--out", "run")
    assert done.returncode == 130
    assert (tmp_path / "run" / "profile" / "profile.json").is_file(), "one step after the first two"


def test_less_than_nothing(piper: Piper, recipe: Path) -> None:
    done = piper(f"{recipe}:job", "--profile", "-1")
    assert (done.returncode, done.stderr) == (
        2,
        "error: piper train: --profile -1\n  hint: record at least 1 step\n",
    )


def test_nothing_to_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "profile") == 2
    assert capsys.readouterr().err == (
        "error: piper profile: there is nothing to profile\n"
        "  hint: name a run's folder or a recipe, or measure this machine with --cluster-out FILE\n"
    )


def test_a_run_folder_without_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "profile", str(tmp_path)) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: there is no profile\n"
        f"  looked: for {tmp_path}/profile/profile.json\n"
        "  hint:   record one: piper train RECIPE --profile 5 --out DIR\n"
    )
