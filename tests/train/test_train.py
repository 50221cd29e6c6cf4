"""`piper train`: what it shows, what it leaves, how it stops and how it goes on."""

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from piper.plan.text import read_plans
from piper.train.run_folder import choose
from tests.train.conftest import Piper


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, tuple[float, float, float]]:
    return {int(m["step"]): (m["loss"], m["grad_norm"], m["lr"]) for m in metrics(folder)}


def test_a_run_shows_its_steps_and_leaves_a_folder(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    done = piper(f"{recipe}:job")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"Compiling {recipe}:job", "Proven. Starting 3 devices on inline"]
    assert [line.split()[1] for line in lines[2:8]] == [f"{step}/6" for step in range(1, 7)]
    assert re.match(r"Trained 6 steps in \d+ s: loss ", lines[8])
    assert lines[9:] == [
        "  run      runs/net-job",
        "  metrics  runs/net-job/metrics.jsonl",
        "  plan     runs/net-job/plan.txt",
        "  look     piper view runs/net-job",
    ]
    folder = tmp_path / "runs" / "net-job"
    fields = ["step", "loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "step_s"]
    assert [list(measure) for measure in metrics(folder)] == [fields] * 6
    assert all(
        measure["tokens_per_s"] is None and measure["samples_per_s"] > 0 for measure in metrics(folder)
    )
    assert [m["step"] for m in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert [m["lr"] for m in metrics(folder)] == pytest.approx([0.001, 0.0028, 0.0046, 0.0064, 0.0082, 0.01])
    assert (folder / "recipe.py").read_text() == recipe.read_text()
    plans = read_plans((folder / "plan.txt").read_text())
    assert sorted(device for plan in plans for device in plan.devices) == [0, 1, 2]
    first = (folder / "strategy.txt").read_text().splitlines()[0]
    assert first == "replicate #0 (net.py:23): replicate(at(PP=0), devices=[0, 1], zero=3)"
    about = json.loads((folder / "run.json").read_text())
    assert (about["seed"], about["steps"], about["devices"]) == (0, 6, "0-2")
    assert {"python", "piper", "torch"} <= set(about["versions"])
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


def test_metrics_that_a_loss_returns_are_shown_and_written(
    piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    done = piper(f"{recipe}:with_metrics")
    assert (done.returncode, done.stderr) == (0, "")
    lines = (tmp_path / "runs" / "net-with_metrics" / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line)["metrics"]["positive"] for line in lines]
    assert len(written) == 2
    assert all(0 < share < 1 for share in written)
    assert f"   positive {written[0]:.4f}   grad norm " in done.stdout


def test_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/net-job", "runs/net-job-2", "runs/net-job-3"):
        assert choose(None, "net.py:job", resume=False) == Path(name)
        Path(name).mkdir(parents=True)
        assert choose(None, "net.py:job", resume=True) == Path(name)
    assert choose(None, "net.py:other", resume=True) == Path("runs/net-other")
    assert choose(Path("here"), "net.py:job", resume=False) == Path("here")


SHAPES = {
    "job": [],
    "several": [
        "Compiling for another shape of batches: x [5, 8], with samples repeated to fill 4 slices of equal size",
        "Compiling for another shape of batches: x [4, 8]",
    ],
}


@pytest.mark.parametrize("name", ["job", pytest.param("several", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_was_not_stopped(
    name: str, piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    whole = piper(f"{recipe}:{name}", "--out", "whole")
    shapes = [line for line in whole.stdout.splitlines() if line.startswith("Compiling for")]
    assert shapes == SHAPES[name]
    piper(f"{recipe}:{name}", "--out", "parts", "--steps", "3")
    done = piper(f"{recipe}:{name}", "--out", "parts", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Going on from parts/checkpoints/step-00000003, after step 3\n" in done.stdout
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole"), "to the last bit"
    last = [tmp_path / run / "checkpoints" / "step-00000006" for run in ("whole", "parts")]
    for file in sorted(path.name for path in last[0].glob("*.safetensors")):
        one, other = (load_file(folder / file) for folder in last)
        assert one.keys() == other.keys()
        assert all(bool((one[key] == other[key]).all()) for key in one)


@pytest.mark.parametrize("after", ["faster", "faster_elsewhere"])
def test_the_rate_after_a_resume_is_the_one_in_use(
    after: str, piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    """A checkpoint's rate and schedule win over those of a changed recipe, and the metrics say so."""
    piper(f"{recipe}:job", "--out", "whole")
    piper(f"{recipe}:job", "--out", "parts", "--steps", "3")
    done = piper(f"{recipe}:{after}", "--out", "parts", "--resume")
    assert done.returncode == 0, done.stderr
    assert [m["lr"] for m in metrics(tmp_path / "parts")] == pytest.approx(
        [0.001, 0.0028, 0.0046, 0.0064, 0.0082, 0.01]
    )
    whole, parts = ([m["loss"] for m in metrics(tmp_path / run)] for run in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-5), "these are the rates that were used"


@pytest.mark.usefixtures("own_captures")
def test_a_resumed_run_builds_no_model(piper: Piper, recipe: Path) -> None:
    """The model is made for the capture, of tensors that hold nothing; the checkpoint has the rest."""
    assert piper(f"{recipe}:noticed", "--out", "run", "--steps", "2").returncode == 0
    assert sys.modules["recipe_net"].BUILT.count(False) == 1
    assert piper(f"{recipe}:noticed", "--out", "run", "--steps", "3", "--resume").returncode == 0
    assert set(sys.modules["recipe_net"].BUILT) == {True}


def test_a_killed_run_repeats_no_step_in_its_metrics(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    """Killed after step 3 was told of, and while step 4 was: the newest checkpoint is that of step 2."""
    piper(f"{recipe}:single", "--out", "run", "--steps", "2")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert piper(f"{recipe}:single", "--out", "run", "--resume", "--steps", "5").returncode == 0
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert metrics(tmp_path / "run")[2]["loss"] != 1.0


def test_a_run_killed_before_its_first_checkpoint_starts_anew(
    piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    done = piper(f"{recipe}:single", "--out", "run", "--resume", "--steps", "1")
    assert done.returncode == 0
    assert done.stdout.startswith("run has no complete checkpoint yet: starting at the first step\n")


def test_a_run_that_is_done_has_nothing_to_resume(piper: Piper, recipe: Path) -> None:
    piper(f"{recipe}:single", "--steps", "2")
    done = piper(f"{recipe}:single", "--steps", "2", "--resume")
    assert done.returncode == 0
    assert done.stdout.endswith("The run is at step 2 already: --steps asks for more\n")


def test_ctrl_c_finishes_the_step_and_saves(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    done = piper(f"{recipe}:interrupted", "--out", "run")
    assert done.returncode == 130
    again = f"piper train {recipe}:interrupted --on inline --steps 6 --out run --resume"
    assert done.stderr == f"stopped after step 3 of 6; go on with: {again}\n"
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3]
    assert piper(f"{recipe}:single", "--out", "run", "--resume").returncode == 0
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_without_checkpoints_says_so(piper: Piper, recipe: Path) -> None:
    done = piper(f"{recipe}:interrupted_unsaved")
    assert done.returncode == 130
    assert done.stderr == "stopped after step 3 of 6; nothing was saved, because the job has no checkpoint\n"


SETS_RATES = '''
class Sets(piper.callbacks.Callback):
    """Sets a rate after step 2, and writes down the rate of each next step as the workers have it."""

    def on_step(self, run, step, result):
        if step == 2:
            run.optimizer[0]["lr"] = 0.5
        with open("rates.txt", "a") as file:
            print(run.optimizer[0]["lr"], file=file)

def sets():
    return job(strategy=(), checkpoint=None, callbacks=[Sets()])
'''


def test_metrics_have_the_rate_that_a_callback_set(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text() + SETS_RATES)
    done = piper(f"{recipe}:sets")
    assert (done.returncode, done.stderr) == (0, "")
    *seen, _ = [float(line) for line in (tmp_path / "rates.txt").read_text().splitlines()]
    written = [m["lr"] for m in metrics(tmp_path / "runs" / "net-sets")]
    assert written == [0.001, *seen] and seen[1] == 0.5 and seen[2] != 0.5
