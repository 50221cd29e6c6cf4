"""A recipe for tests on several hosts: two stages in double precision, and steps that take a tenth of a second."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import piper
from piper.data import Samples
from piper.data.batches import Batch, Places

STEPS = 40
LONG = 1500  # steps in which a host that was lost comes back


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = torch.tanh(layer(x))
        return x


class Slow(Samples):
    pause = 0.1  # seconds that a batch takes

    def collect(self, samples: Places) -> Batch:
        time.sleep(self.pause)
        return super().collect(samples)


class Slower(Slow):
    pause = 0.6


def rows() -> list[dict[str, Tensor]]:
    drawn = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    return [{"x": row} for row in drawn]


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    value: Tensor = (model(batch["x"]) - batch["x"]).square().mean()
    return value


def pair() -> piper.Job:
    """Both stages on devices of their own."""
    return job([piper.place(piper.at(PP=0), [0]), piper.place(piper.at(PP=1), [1])])


def copied() -> piper.Job:
    """Both stages on machines of their own, and the state of each on the other one too."""
    stages = [piper.place(piper.at(PP=0), [0]), piper.place(piper.at(PP=1), [1])]
    return job([*stages, piper.protect(piper.at(), copies=1, devices_per_machine=1)])


def slowly() -> piper.Job:
    """The same, with time for hosts that find each other again."""
    return replace(copied(), data=lambda: Slower(rows(), batch=8, seed=1))


def replicas(devices: Sequence[int]) -> list[piper.Directive]:
    """Replicas of the whole model. Those of two machines have the state of each other."""
    copies = [piper.protect(piper.at(), copies=1, devices_per_machine=2)] if len(devices) > 2 else []
    return [piper.replicate(piper.at(), devices, zero=1), *copies]


def elastic() -> piper.Job:
    """Four devices, or two while one of two machines is lost. It trains until it is ended."""
    return replace(job([]), strategy=replicas, elastic=(2, 4), steps=LONG)


def long() -> piper.Job:
    """The same on one device, without pauses."""
    return replace(alone(), data=lambda: Samples(rows(), batch=8, seed=1), steps=LONG, checkpoint=None)


def alone() -> piper.Job:
    """Both stages on one device."""
    return job([piper.place(piper.at(), [0])])


def job(strategy: list[piper.Directive]) -> piper.Job:
    return piper.Job(
        model=Net,
        loss=loss,
        data=lambda: Slow(rows(), batch=8, seed=1),
        strategy=strategy,
        steps=STEPS,
        precision="fp64",
        checkpoint=piper.Checkpoint(folder="checkpoints", every=5),
    )
