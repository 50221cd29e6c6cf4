"""`torchrun --max-restarts` with `--resume`: a rank that is killed costs the steps since the checkpoint."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.workers.family import family
from tests.workers.test_preemption import ranks_of
from tests.workers.test_torchrun import ENVIRONMENT, command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 30
RECIPE = f"""
import time
from dataclasses import replace
import piper
from tests.workers.ranks import CELL
from tests.runtime.grid import batches, job

class Slow(piper.data.Samples):
    def collect(self, samples):
        time.sleep(0.1)
        return super().collect(samples)

def pair():
    rows = [dict(zip(batch, row)) for batch in batches(CELL, 8) for row in zip(*batch.values())]
    size = len(next(iter(batches(CELL, 1)[0].values())))
    saved = piper.Checkpoint(folder="checkpoints", every=4)
    data = lambda: Slow(rows, batch=size, seed=3)
    return replace(job(CELL, data=data, steps={STEPS}), checkpoint=saved)
"""


def written(run: Path) -> list[tuple[int, float, float]]:
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in found]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_rank_goes_on_by_itself(tmp_path: Path, rank: str) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    with family() as ranks:
        alone = ranks.start(
            [sys.executable, "-m", "piper", "train", "recipe.py:pair", "--on", "inline", "--out", "alone"],
            env=ENVIRONMENT,
            folder=tmp_path,
        )
        assert alone.wait(200) == 0, alone.communicate(timeout=10)
        words = ["--max-restarts", "2", "-m", "piper", "train", "recipe.py:pair", "--out", "run", "--resume"]
        agent = ranks.start(command(*words), env=ENVIRONMENT, folder=tmp_path)
        until = time.monotonic() + 200
        while len(written(tmp_path / "run")) < 10:
            assert time.monotonic() < until and agent.poll() is None, agent.communicate(timeout=60)
            time.sleep(0.05)
        os.kill(ranks_of(ranks, "train")[rank], signal.SIGKILL)
        _, err = agent.communicate(timeout=200)
    assert agent.returncode == 0, err
    assert [step for step, _, _ in written(tmp_path / "run")] == [*range(1, STEPS + 1)]
    assert written(tmp_path / "run") == written(tmp_path / "alone"), "to the bit"
