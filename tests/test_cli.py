"""The command line: exit codes, one message for a user's error, JSON alone on stdout."""

import json
import subprocess
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.cli import main
from piper.cli.train import called_as
from piper.plan.prove import prove
from piper.plan.text import read_plans

ROOT = Path(__file__).parents[1]
RECIPE = """
import torch
from torch import nn
import piper

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x).relu()
        return x

def job(strategy=(), **changes):
    fields = dict(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(8, 8)}],
        strategy=strategy,
    )
    return piper.Job(**{**fields, **changes})

def pipeline():
    places = [piper.replicate(piper.at(PP=s), [2 * s, 2 * s + 1], zero=2) for s in range(2)]
    return job([*places, piper.split(piper.at(), parts=2), *piper.schedules.one_f_one_b(2, 2)])

def single():
    return job()

def number():
    return 3

def broken():
    return undefined_name

def uneven():
    return job([piper.split(piper.at(), parts=3)])

def no_batch():
    return job(data=lambda: [])

def not_tensors():
    return job(data=lambda: [{"x": [1, 2]}])

def ragged():
    return job(data=lambda: [{"x": torch.ones(8, 8), "y": torch.ones(4)}])

def lbfgs():
    optimizer = lambda params: torch.optim.LBFGS(params, lr=0.1)
    return job([piper.replicate(piper.at(), [0, 1], zero=1)], optimizer=optimizer)

def from_file():
    return job("missing.json")
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "net.py"
    path.write_text(RECIPE)
    return path


Piper = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def piper(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Piper:
    """The command line in this process: importing torch anew for each call would take most of the time."""
    monkeypatch.chdir(ROOT)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["piper", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), shown.out, shown.err)

    return call


def test_plan_prints_the_grid_and_the_proof(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    done = piper("plan", f"{recipe}:pipeline", "--device", "2", "--why", "--text", str(tmp_path / "plan.txt"))
    assert done.returncode == 0, done.stderr
    assert "0,1  0F0 0F1 .   .   0B0 --  .   0B1 --" in done.stdout
    assert "2,3  .   1F0 1B0 --  1F1 1B1 --  .   ." in done.stdout
    assert "Device 2, in the order it issues" in done.stdout
    assert "why: nothing was decided against the strategy" in done.stdout
    assert "Proven: 4 devices, 2 programs" in done.stdout
    prove(read_plans((tmp_path / "plan.txt").read_text()))


def test_plan_as_json_is_one_object(piper: Piper, recipe: Path) -> None:
    done = piper("plan", f"{recipe}:pipeline", "--json")
    report = json.loads(done.stdout)
    assert list(report) == ["schema", "verb", "devices", "nodes", "instructions", "comm_bytes", "peak_bytes"]
    assert report["devices"] == [0, 1, 2, 3]
    assert all(len(report[key]) == 4 for key in ("instructions", "comm_bytes", "peak_bytes"))
    assert report["comm_bytes"][0] > 0


def test_plan_of_a_single_device_moves_nothing(piper: Piper, recipe: Path) -> None:
    report = json.loads(piper("plan", f"{recipe}:single", "--json").stdout)
    assert (report["devices"], report["comm_bytes"]) == ([0], [0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "singel",
            """
            error: {file}: there is no function 'singel'
              has:  Net, job, pipeline, single, number, broken, uneven, no_batch, not_tensors, ragged, lbfgs, from_file
              hint: did you mean 'single'?
            """,
        ),
        (
            "number",
            """
            error: net.py:32: number() returned int, not a Job
              hint: end the function with `return piper.Job(...)`
            """,
        ),
        (
            "broken",
            """
            error: {file}:36: broken() failed
              why:  NameError: name 'undefined_name' is not defined
              hint: fix the recipe at that line
            """,
        ),
        (
            "uneven",
            """
            error: strategy (net.py:39): 8 samples do not divide into 3 equal pieces
              devices: 1 slices of the samples
              parts:   3 in each slice (MB=3)
              hint:    use a batch that is a multiple of 3, fewer parts or fewer devices
            """,
        ),
        (
            "no_batch",
            """
            error: data (net.py:42): data() holds no batch
              hint: return at least one batch
            """,
        ),
        (
            "not_tensors",
            """
            error: data (net.py:45): a batch is not a dict of tensors
              at:   the batch of step 1
              got:  x: list
              hint: yield batches such as {{"tokens": ..., "labels": ...}}, whose first axis is the samples; leave texts and lists out
            """,
        ),
        (
            "ragged",
            """
            error: data (net.py:48): the fields of a batch disagree on the number of samples
              at:   the batch of step 1
              x:    8 samples
              y:    4 samples
              hint: the first axis of every field is the samples
            """,
        ),
        (
            "lbfgs",
            """
            error: optimizer (net.py:51): LBFGS cannot be used: its step() needs a closure
              why:  a closure computes the loss again within one step, and a plan computes it once
              hint: use an optimizer whose step() takes no arguments, such as AdamW or SGD
            """,
        ),
        (
            "from_file",
            """
            error: missing.json: the strategy cannot be read
              why:  No such file or directory
              hint: give the path of a JSON file
            """,
        ),
    ],
)
def test_a_user_error_is_one_message(piper: Piper, recipe: Path, function: str, message: str) -> None:
    done = piper("plan", f"{recipe}:{function}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == cleandoc(message).format(file=recipe)


def test_a_recipe_that_is_not_there(piper: Piper) -> None:
    done = piper("plan", "nowhere.py:job")
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc("""
        error: nowhere.py: there is no such file
          hint: give the path of a Python file, then :function
    """)


def test_a_recipe_without_a_function(piper: Piper) -> None:
    done = piper("plan", "recipes/moe_dualpipe.py")
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc("""
        error: recipes/moe_dualpipe.py: this is not a recipe
          hint: name the file and the function: piper plan recipes/dense.py:pp
    """)


def test_a_device_that_is_not_there(piper: Piper, recipe: Path) -> None:
    done = piper("plan", f"{recipe}:single", "--device", "4")
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc("""
        error: piper plan: there is no device 4
          devices: 0
          hint:    name one of the devices that the strategy uses
    """)


def test_schedule_csv_is_what_torch_reads(piper: Piper) -> None:
    done = piper("schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--csv")
    assert (done.returncode, done.stdout) == (0, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")


def test_an_unknown_schedule(piper: Piper) -> None:
    done = piper("schedule", "zbw", "--ranks", "2", "--microbatches", "2")
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc("""
        error: schedule: there is no schedule 'zbw'
          known: gpipe, 1f1b, interleaved-1f1b, zero-bubble, interleaved-zero-bubble, zbv, v-half, v-min, dualpipe-v, dualpipe, synthesised
          hint:  did you mean zbv?
    """)


def test_a_recipe_compiles_from_a_shell(recipe: Path) -> None:
    words = ["-m", "piper", "plan", f"{recipe}:pipeline", "--json"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("started", "path", "named"),
    [
        (".venv/bin/piper", "", ".venv/bin/piper"),  # as `make demo` does, in a shell that does not find it
        (".venv/bin/piper", "bin", "piper"),
        ("/somewhere/piper/__main__.py", "", "piper"),
    ],
)
def test_a_command_to_go_on_with_is_one_that_the_shell_finds(
    started: str, path: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "piper"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [started])
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else str(tmp_path))
    assert called_as() == named
