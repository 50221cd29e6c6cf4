"""`kill -9` of the driver or of a worker at random moments, then `--resume`: the run is the run never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS, STEPS, SEED = 20, 60, 11
ROOT = Path(__file__).parents[2]
RECIPE = """
import time
import torch
from torch import nn
import piper
from piper.data import Samples

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x

class Slow(Samples):
    def collect(self, samples):
        time.sleep(0.03)
        return super().collect(samples)

def job():
    rows = [{"x": row} for row in torch.randn(50, 64, generator=torch.Generator().manual_seed(0))]
    return piper.Job(
        model=Net,
        loss=lambda model, batch: (model(batch["x"]) - batch["x"]).square().mean(),
        data=lambda: Slow(rows, batch=8, seed=1),
        strategy=[piper.place(piper.at(PP=0), [0]), piper.place(piper.at(PP=1), [1])],
        steps=STEPS,
        checkpoint=piper.Checkpoint(folder="checkpoints", every=1),
    )
"""


def start(recipe: Path, out: Path) -> subprocess.Popen[str]:
    words = ["train", f"{recipe}:job", "--out", str(out), "--resume", "--on", "local"]
    return subprocess.Popen(
        [sys.executable, "-m", "piper", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents.setdefault(int(after[1]), []).append(int(stat.parent.name))
    found = [pid]
    for member in found:
        found += parents.get(member, [])
    return found


def told(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def interfere(process: subprocess.Popen[str], out: Path, rng: random.Random) -> str:
    """Wait for a random moment, then kill the driver, the fork server or a worker."""
    before, wanted = len(told(out)), rng.randint(0, 3)
    until = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until:
        if len(told(out)) >= before + wanted and len(family(process.pid)) >= 4:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    if process.poll() is None:
        os.kill(rng.choice(family(process.pid)), signal.SIGKILL)
    return process.communicate(timeout=60)[1]


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_run_that_is_killed_again_and_again_always_goes_on(tmp_path: Path) -> None:
    recipe = tmp_path / "net.py"
    recipe.write_text(RECIPE.replace("STEPS", str(STEPS)))
    rng = random.Random(SEED)
    for _ in range(KILLS):
        errors = interfere(start(recipe, tmp_path / "killed"), tmp_path / "killed", rng)
        assert "Traceback" not in errors, errors
    last = start(recipe, tmp_path / "killed")
    assert last.wait(timeout=120) == 0, last.stderr and last.stderr.read()
    assert start(recipe, tmp_path / "whole").wait(timeout=120) == 0
    killed, whole = ([(m["step"], m["loss"]) for m in told(tmp_path / run)] for run in ("killed", "whole"))
    assert [step for step, _ in killed] == [*range(1, STEPS + 1)], "no step lost, none twice"
    assert killed == whole, "the same samples in the same order, to the last bit"
