"""A small recipe, and the command line in this process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from piper.cli import main

RECIPE = '''
import signal
from dataclasses import replace
import torch
from torch import nn
import piper
from piper.data import Samples

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        with piper.annotate("PP"):
            x = self.layers[0](x)
        with piper.annotate("PP"):
            return self.layers[1](torch.log(x.square().mean(-1, keepdim=True) + 1) * x)

def rows():
    generator = torch.Generator().manual_seed(0)
    return [{"x": row} for row in torch.randn(30, 8, generator=generator)]

STAGES = [piper.replicate(piper.at(PP=0), [0, 1], zero=3), piper.place(piper.at(PP=1), [2])]

def job(**changes):
    fields = dict(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: Samples(rows(), batch=8, seed=1),
        strategy=[*STAGES, piper.split(piper.at(), parts=2), *piper.schedules.one_f_one_b(2, 2)],
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        clip_norm=1.0,
        steps=6,
        checkpoint=piper.Checkpoint(folder="checkpoints", every=2),
    )
    return piper.Job(**{**fields, **changes})

def measured(model, batch):
    y = model(batch["x"])
    return y.square().mean(), {"positive": ((y > 0).sum(), y.numel())}

def with_metrics():
    return job(loss=measured, checkpoint=None, steps=2)

def unsaved():
    return job(strategy=(), checkpoint=None)

def other_seed():
    return job(seed=7)

def other_layout():
    return job(strategy=[piper.replicate(piper.at(), [0, 1], zero=1)])

def single():
    return job(strategy=())

class Wider(Net):
    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Linear(8, 4)

def other_model():
    return job(model=Wider, strategy=())

BUILT = []  # for each model, whether its parameters hold nothing

def noticed():
    from torch._subclasses import FakeTensor
    def model():
        built = Net()
        BUILT.append(isinstance(built.layers[0].weight, FakeTensor))
        return built
    return job(model=model)

def changed(step, change):
    """The data, in which one batch is changed."""
    def data():
        for number, batch in enumerate(Samples(rows(), batch=8, seed=1), start=1):
            yield change(batch) if number == step else batch
    return data

def interrupted():
    def interrupt(batch):
        signal.raise_signal(signal.SIGINT)
        return batch
    return job(data=changed(3, interrupt), strategy=())

def interrupted_unsaved():
    return replace(interrupted(), checkpoint=None)

def finite_only():
    return job(data=changed(4, lambda batch: {"x": batch["x"] * float("nan")}), strategy=())

def nan():
    return job(data=changed(4, lambda batch: {"x": batch["x"] * float("nan")}))

def large():
    return job(data=changed(4, lambda batch: {"x": batch["x"] * 1e30}), strategy=STAGES)

def uneven():
    return job(strategy=[piper.split(piper.at(), parts=3)])

def deeper():
    return job(data=changed(3, lambda batch: {"x": batch["x"][:, None]}), strategy=())

def several():
    """Batches of 8, 5 and 4 samples in turn."""
    sizes = (8, 5, 4)
    each = lambda: zip(range(6), Samples(rows(), batch=8, seed=1))
    return job(data=lambda: [{"x": batch["x"][:sizes[n % 3]]} for n, batch in each()])

def short():
    return job(data=lambda: iter_once, strategy=())

iter_once = iter([{"x": torch.ones(8, 8)}, {"x": torch.ones(8, 8)}])

def faster(**changes):
    """The recipe, after its author has changed the learning rate and its schedule."""
    optimizer = lambda params: torch.optim.AdamW(params, lr=1.0)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    return job(optimizer=optimizer, scheduler=scheduler, **changes)

def faster_elsewhere():
    return faster(strategy=[piper.replicate(piper.at(), [0, 1], zero=1)])
'''
Piper = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def command(words: list[str]) -> Iterator[None]:
    """The command line as `piper` with these words would see it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["piper", *words])
        yield


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "net.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def piper(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Piper:
    """The command line in this process, in an empty folder, on threads."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        with command(["train", *words, "--on", "inline"]), pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), shown.out, shown.err)

    return call
