"""`piper train --resume` under another layout: the loss curve of the run that was never stopped, to 1e-9."""

import json
import shutil
from pathlib import Path

import pytest

from piper.cli import main
from tests.train.conftest import Piper, command

STEPS, STOPPED = 6, 3
RECIPE = """
from dataclasses import replace
import torch
from torch import nn
import piper
from piper import at, place, replicate, split
from piper.data import Samples

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x

ROWS = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

def pp2_dp2_zero3():
    pairs = [replicate(at(PP=stage), [0, 1] if stage < 2 else [2, 3], zero=3) for stage in range(4)]
    return piper.Job(
        model=Net,
        loss=lambda model, batch: (model(batch["x"]) - batch["x"]).square().mean(),
        data=lambda: Samples([{"x": row} for row in ROWS.double()], batch=8, seed=3),
        strategy=[*pairs, split(at(), parts=2)],
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        precision="fp64",
        clip_norm=1.0,
        steps=6,
        checkpoint=piper.Checkpoint(folder="checkpoints", every=3, keep=1),
    )

def dp4():
    return replace(pp2_dp2_zero3(), strategy=[replicate(at(), [0, 1, 2, 3])])

def one():
    return replace(pp2_dp2_zero3(), strategy=())

def pp4():
    places = [place(at(PP=stage), [stage]) for stage in range(4)]
    schedule = piper.schedules.one_f_one_b(4, 4)
    return replace(pp2_dp2_zero3(), strategy=[*places, split(at(), parts=4), *schedule])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, a run that was never stopped, and one that was stopped half way."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "net.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for out, steps in (("whole", STEPS), ("stopped", STOPPED)):
            words = ["net.py:pp2_dp2_zero3", "--out", out, "--steps", str(steps), "--on", "inline"]
            with command(["train", *words]), pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
    return folder


def curve(folder: Path) -> list[tuple[float, ...]]:
    """Every step of a run: its number, loss, gradient norm and learning rate."""
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(measure["step"], measure["loss"], measure["grad_norm"], measure["lr"]) for measure in told]


@pytest.mark.parametrize("layout", ["dp4", "one", "pp4"])
def test_a_run_goes_on_under_another_layout(layout: str, runs: Path, piper: Piper, tmp_path: Path) -> None:
    shutil.copytree(runs / "stopped", tmp_path / "run")
    done = piper(f"{runs / 'net.py'}:{layout}", "--out", "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Going on from run/checkpoints/step-00000003, after step 3\n" in done.stdout
    for got, wanted in zip(curve(tmp_path / "run"), curve(runs / "whole"), strict=True):
        assert got == pytest.approx(wanted, rel=1e-9), f"step {wanted[0]}"
