"""An error of the model comes again at the same step and instruction: one retry, then one message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]
RECIPE = """
import torch
from torch import nn

import piper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 1)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def data():
    for step in range(20):  # the fifth batch has a token that the table does not have, on every replica
        yield {"tokens": torch.full((4, 3), 99 if step == 4 else step % 10)}


def job():
    return piper.Job(
        model=Net,
        loss=lambda model, batch: model(batch["tokens"]).square().mean(),
        data=data,
        strategy=[piper.replicate(piper.at(), [0, 1])],
        steps=10,
    )
"""


def test_it_is_tried_once_more_and_said_once(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-m", "piper", "train", "net.py:job", "--on", "local", "--out", "run"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout.count("Recovering, ") == 1, done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "IndexError: index out of range" in errors[0], done.stderr
