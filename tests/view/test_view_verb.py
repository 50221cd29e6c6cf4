"""`piper view`: what it writes, and one message for each way it can be asked wrongly."""

import json
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.cli import main
from piper.plan.text import show_plans
from piper.simulate.cluster import load_cluster
from piper.simulate.profile import Profile, Track, write_profile
from piper.view.provenance import FILE, show_background
from tests.view.scenes import demo
from tests.view.test_background import background

Piper = Callable[..., tuple[int, str, str]]
RECIPE = """
import torch
from torch import nn
import piper

def loss(model, batch):
    return model(batch["x"]).square().mean()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x).relu()
        return x

def job():
    places = [piper.place(piper.at(PP=s), [s]) for s in range(2)]
    strategy = [*places, piper.split(piper.at(), parts=2)]
    return piper.Job(model=Net, loss=loss, data=lambda: [{"x": torch.ones(8, 8)}], strategy=strategy)
"""


@pytest.fixture
def piper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Piper:
    """Run the command line in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["piper", *words])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def run_folder(folder: Path, *, profiled: bool, recipe: str = "gone.py:job") -> None:
    """What `piper train` leaves behind, with a plan that no recipe here makes."""
    folder.mkdir()
    plans = demo().plans
    (folder / "plan.txt").write_text(show_plans(plans))
    (folder / FILE).write_text(show_background(background(demo(), 4, 4), plans))
    (folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    if profiled:
        tracks = tuple(
            Track(
                device=device,
                steps=(tuple((span.start, span.end, 0.0) for span in timeline.spans),),
                error=3e-5,
            )
            for timeline in demo().planned.timelines
            for device in timeline.devices
        )
        profile = Profile(plans=plans, tracks=tracks, model="a", recipe=recipe, first=3)
        write_profile(profile, folder / "profile")


def embedded(page: Path) -> dict[str, object]:
    text = page.read_text(encoding="utf-8").partition('id="facts">')[2].partition("</script>")[0]
    found: dict[str, object] = json.loads(text)
    return found


def test_a_recipe_becomes_a_page_a_picture_and_a_trace(piper: Piper, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    words = ["--out", "a.html", "--svg", "a.svg", "--trace", "a.json"]
    code, out, err = piper("view", "small.py:job", *words)
    assert (code, out, err) == (0, "a.html: open it in a browser\n", "")
    facts = embedded(tmp_path / "a.html")
    assert facts["title"] == "small.py:job"
    assert facts["source"] == RECIPE
    assert [said["title"] for said in facts["strategy"]] == [  # type: ignore[attr-defined]
        "place #0 (small.py:20)",
        "place #1 (small.py:20)",
        "split #2 (small.py:21)",
    ]
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["clock"] == "h100"


def test_a_page_says_what_a_device_has_and_counts_fused_kernels(piper: Piper, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    times = []
    for words in ((), ("--compile",)):
        assert piper("view", "small.py:job", "--out", "a.html", *words)[0] == 0
        facts = embedded(tmp_path / "a.html")
        times.append(float(str(facts["step"])) / float(str(facts["ticks"])))
    assert times[1] < times[0]
    usable = load_cluster("h100").usable(3)  # activations one way, gradients back, and the sums of a step
    assert [program["usable"] for program in facts["programs"]] == [usable, usable]  # type: ignore[attr-defined]


def test_a_run_on_cpu_is_timed_on_cpu(piper: Piper, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(RECIPE)
    assert piper("train", "small.py:job", "--on", "inline", "--steps", "1", "--out", "run")[0] == 0
    for words, clock in (((), "cpu"), (("--cluster", "h100"), "h100")):
        assert piper("view", "run", *words)[0] == 0
        assert embedded(tmp_path / "report.html")["clock"] == clock
    code, _, err = piper("view", "run", "--compile")
    assert code == 2
    assert err == (
        "error: run: a run is shown as it was trained\n"
        "  asked: --compile\n"
        "  hint:  name the recipe instead: piper view file.py:function\n"
    )


def test_a_run_without_its_background(piper: Piper, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", profiled=False)
    (tmp_path / "run" / FILE).unlink()
    assert piper("view", "run") == (
        2,
        "",
        cleandoc("""
            error: run: the run has no view.json of its plans
              hint: a run that is trained now writes it; `piper view file.py:function` shows the recipe
        """)
        + "\n",
    )


def test_a_run_with_a_profile_shows_what_was_measured(piper: Piper, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", profiled=True)
    code, _, err = piper("view", "run", "--out", "page.html")
    assert (code, err) == (0, "")
    assert embedded(tmp_path / "page.html")["about"] == "measured in step 3, clocks within 60 µs"
    assert list(embedded(tmp_path / "page.html")["measured"]) == ["0", "1", "2", "3"]  # type: ignore[call-overload]


def test_a_schedule_becomes_a_picture(piper: Piper, tmp_path: Path) -> None:
    code, out, err = piper("schedule", "1f1b", "--ranks", "2", "--microbatches", "3", "--svg", "a.svg")
    assert (code, out, err) == (0, "", "")
    assert '<title id="title">1f1b, 2 ranks, 3 microbatches</title>' in (tmp_path / "a.svg").read_text()


def test_an_unknown_target(piper: Piper) -> None:
    assert piper("view", "nowhere") == (
        2,
        "",
        cleandoc("""
            error: nowhere: there is no such recipe or run
              hint: name a recipe, file.py:function, or the folder that `piper train --out` wrote
        """)
        + "\n",
    )


def test_an_unknown_recipe(piper: Piper) -> None:
    assert piper("view", "nowhere.py:job") == (
        2,
        "",
        cleandoc("""
            error: nowhere.py: there is no such file
              hint: give the path of a Python file, then :function
        """)
        + "\n",
    )


def test_a_folder_that_holds_no_run(piper: Piper, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert piper("view", "empty") == (
        2,
        "",
        cleandoc("""
            error: empty: this folder holds no run
              looked: for empty/plan.txt
              hint:   name the folder that `piper train --out DIR` wrote, or a recipe: file.py:function
        """)
        + "\n",
    )


def test_a_page_that_cannot_be_written(piper: Piper, tmp_path: Path) -> None:
    run_folder(tmp_path / "run", profiled=False)
    assert piper("view", "run", "--out", "missing/page.html") == (
        2,
        "",
        cleandoc("""
            error: missing/page.html: this file cannot be written
              why:  No such file or directory
              hint: name a file in a folder that exists and that you own
        """)
        + "\n",
    )
