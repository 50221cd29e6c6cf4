"""A recipe for tests on several hosts: two stages in double precision, and steps that take a tenth of a second."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import piper
from piper.callbacks import Callback, Running, StepNumbers
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


WIDTH, LAYERS, HEADERS = 512, 4, 66  # bytes of Ethernet, IP and TCP in front of each packet


class Wide(nn.Module):
    """As many parameters as make what the driver sends small beside what devices exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("LAYER"):
                x = torch.tanh(layer(x))
        return x


class Counted(Callback):
    """Writes the bytes that the driver's machine has sent in all after each step, without the headers of packets."""

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        (numbers,) = (line.split()[1:] for line in lines if line.split()[0] == "eth0:")
        size, packets = int(numbers[8]), int(numbers[9])
        with (run.folder / "traffic.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "sent": size - HEADERS * packets}) + "\n")


def wide(within: int | None = None, owners: int | None = None) -> piper.Job:
    """ZeRO-3 on four devices of two machines."""
    drawn = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(), range(4), zero=3, within=within, optimizer_within=owners),
        piper.split(piper.at(), parts=2),
    ]
    return replace(
        job(strategy),
        model=Wide,
        data=lambda: Samples([{"x": row} for row in drawn], batch=8, seed=1),
        callbacks=[Counted()],
        checkpoint=None,
        steps=7,
    )


def groups() -> piper.Job:
    """Both happen inside a machine, and shards are summed between the two."""
    return wide(within=2)


def owners() -> piper.Job:
    """The optimizer's state is sharded over all devices."""
    return wide(within=2, owners=4)


def copied_groups() -> piper.Job:
    """The state of a machine is that of the other one: protection copies nothing between them."""
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(), range(4), zero=3, within=2),
        piper.protect(piper.at(), copies=1, devices_per_machine=2),
    ]
    return job(strategy)
