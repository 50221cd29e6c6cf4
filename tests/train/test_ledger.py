"""No sample is lost or repeated, however often a run is stopped and whatever layout it goes on under.

The model is its own ledger: each use of a sample adds one to that sample's parameter, on the device that had it.
"""

from pathlib import Path

import pytest

from piper.checkpoint.load import Values
from tests.train.conftest import Piper

SAMPLES, EPOCHS = 32, 3
RECIPE = """
from dataclasses import replace
import torch
from torch import nn
from torch.utils.data import DataLoader
import piper
from piper import at, replicate, split
from piper.data import Samples, Stream

BATCH = 8
ROWS = [{"id": i} for i in range(32)]

class Ledger(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Embedding(32, 1)
        nn.init.zeros_(self.seen.weight)
    def forward(self, ids):
        return self.seen(ids)

def samples():
    return piper.Job(
        model=Ledger,
        loss=lambda model, batch: -model(batch["id"]).mean(),
        data=lambda: Samples(ROWS, batch=BATCH, seed=4),
        optimizer=lambda params: torch.optim.SGD(params, lr=BATCH),  # the mean made a share of each sample
        steps=12,
        checkpoint=piper.Checkpoint(folder="checkpoints", every=100),
    )

def stream():
    return replace(samples(), data=lambda: Stream(ROWS, batch=BATCH))

def loader():
    return replace(samples(), data=lambda: DataLoader(ROWS, batch_size=BATCH, shuffle=True))

def stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader
    return replace(samples(), data=lambda: StatefulDataLoader(ROWS, batch_size=BATCH, shuffle=True))

def dealt(job):
    return replace(job, strategy=[replicate(at(), [0, 1], zero=3), split(at(), parts=2)])

samples_on_two = lambda: dealt(samples())
stream_on_two = lambda: dealt(stream())
loader_on_two = lambda: dealt(loader())
stateful_on_two = lambda: dealt(stateful())
"""


@pytest.mark.parametrize("source", ["samples", "stream", "loader", "stateful"])
def test_every_sample_is_seen_once_an_epoch(source: str, piper: Piper, tmp_path: Path) -> None:
    if source == "stateful":
        pytest.importorskip("torchdata")
    (tmp_path / "ledger.py").write_text(RECIPE)
    for layout, steps in (("", 5), ("_on_two", 9), ("", 12)):  # two stops, each in the middle of an epoch
        done = piper(f"ledger.py:{source}{layout}", "--out", "run", "--steps", str(steps), "--resume")
        assert done.returncode == 0, done.stderr
    counts = Values(tmp_path / "run" / "checkpoints" / "step-00000012")["seen.weight"]
    assert counts.flatten().tolist() == [EPOCHS] * SAMPLES
