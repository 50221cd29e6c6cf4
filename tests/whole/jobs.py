"""Whole jobs: a feature under ZeRO and a schedule, from a shuffled loader, with clipping, evaluation and checkpoints."""

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

import piper
from piper import at, average, replicate, shard, split
from piper.callbacks import Callback, Numbers, Running, StepNumbers
from piper.data import balance_documents
from piper.directives import Directive
from tests.runtime.grid import SHAPES
from tests.whole.models import FAMILIES, SAMPLES, Batch, Family, rows

RANKS, MICROBATCHES, BATCH = 2, 2, 8
STEPS, STOP, EVERY, CLIP = 6, 3, 2, 0.5
KILLED = 4  # the updates after which a worker is killed
Place = Callable[[Family, int, Sequence[int], int], list[Directive]]  # of a stage, on its devices, with ZeRO


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """How a feature places a stage."""

    place: Place
    width: int  # devices of a stage
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    last: Callable[[], list[Directive]] = list


def context(family: Family, stage: int, devices: Sequence[int], ways: int, **how: str) -> Directive:
    fields = dict.fromkeys(family.fields, 1)
    return shard(at(PP=stage), devices, ways, axis="CP", batch=fields, **how)  # type: ignore[arg-type]


def tensor(
    family: Family, stage: int, devices: Sequence[int], ways: int, between: int | None = 1
) -> Directive:
    return shard(at(PP=stage), devices, ways, axis="TP", weights=family.weights, between=between)


def replicas(family: Family, stage: int, devices: Sequence[int], zero: int, **groups: int) -> list[Directive]:
    return [replicate(at(PP=stage), devices, zero=zero, **groups)]  # type: ignore[arg-type]


def with_tensor(between: int | None = 1, ways: int = 2, experts: int = 0) -> Place:
    def place(family: Family, stage: int, devices: Sequence[int], zero: int) -> list[Directive]:
        own = [shard(at(PP=stage, EP="*"), devices, ways=experts)] if experts else []
        return [*replicas(family, stage, devices, zero), tensor(family, stage, devices, ways, between), *own]

    return place


def with_context(attention: str = "gather", balance: str | None = "zigzag", experts: int = 0) -> Place:
    def place(family: Family, stage: int, devices: Sequence[int], zero: int) -> list[Directive]:
        own = [shard(at(PP=stage, EP="*"), devices, ways=experts)] if experts else []
        sequence = context(family, stage, devices, 2, attention=attention, balance=balance)  # type: ignore[arg-type]
        return [*replicas(family, stage, devices, zero), sequence, *own]

    return place


def tensor_then_replicas(family: Family, stage: int, devices: Sequence[int], zero: int) -> list[Directive]:
    """Shard the weights of the first rank's stages, and replicate those of the second."""
    return (with_tensor() if stage % RANKS == 0 else replicas)(family, stage, devices, zero)


def context_then_tensor(family: Family, stage: int, devices: Sequence[int], zero: int) -> list[Directive]:
    """Shard the sequence of the first rank's stages over pairs, and the weights of the second's over four."""
    return (with_context() if stage % RANKS == 0 else with_tensor(ways=4))(family, stage, devices, zero)


OUTER = {"lr": 0.7, "momentum": 0.5}
FEATURES: Mapping[str, Feature] = {
    "within": Feature(place=partial(replicas, within=2), width=4, zeros=(3, 1, 2, 3)),
    "owners": Feature(place=partial(replicas, within=2, optimizer_within=4), width=4, zeros=(3,)),
    "tp": Feature(place=with_tensor(None), width=2),
    "sp": Feature(place=with_tensor(), width=2),
    "tp|dp": Feature(place=tensor_then_replicas, width=2),
    "cp|tp": Feature(place=context_then_tensor, width=4),
    "cp ep": Feature(place=with_context(experts=2), width=2),
    "cp wide ep": Feature(place=with_context(experts=4), width=4),
    "sp ep": Feature(place=with_tensor(experts=2), width=2),
    "sp wide ep": Feature(place=with_tensor(experts=4), width=4),
    "sp narrow ep": Feature(place=with_tensor(ways=4, experts=2), width=4),
    "tp ep": Feature(place=with_tensor(None, experts=2), width=4),
    "ring": Feature(place=with_context("ring"), width=2),
    "gather": Feature(place=with_context("gather"), width=2),
    "heads": Feature(place=with_context("heads", None), width=2),
    "balanced ring": Feature(place=with_context("ring", None), width=2),
    "balanced gather": Feature(place=with_context("gather", None), width=2),
    "average": Feature(place=replicas, width=4, last=lambda: [average(at(), across=[0, 2], every=EVERY)]),
    "average of one": Feature(
        place=replicas, width=2, last=lambda: [average(at(), across=[0, 1], every=EVERY)]
    ),
    "outer": Feature(
        place=with_tensor(),
        width=4,
        last=lambda: [average(at(), across=[0, 2], every=EVERY, outer=OUTER)],
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Features between which runs change, and two families of models."""

    features: tuple[str, ...]
    families: tuple[str, ...]
    ways: int = 0  # devices for which documents are balanced
    groups: int = 1  # that train apart
    outer: bool = False  # with an outer optimizer


CHAINS: Mapping[str, Chain] = {
    "dense": Chain(features=("within", "owners", "tp|dp", "cp|tp"), families=("decoder", "gpt2")),
    "experts": Chain(
        features=("cp ep", "sp wide ep", "cp wide ep", "sp narrow ep", "tp ep", "sp ep"),
        families=("moe", "qwen3moe"),
    ),
    "packed": Chain(features=("ring", "sp", "gather", "heads"), families=("flex", "llama flex")),
    "documents": Chain(features=("sp", "tp"), families=("sdpa", "varlen")),
    "balanced": Chain(features=("balanced ring", "balanced gather"), families=("placed", "placed"), ways=2),
    "fused": Chain(features=("sp", "tp|dp"), families=("two tokens fused", "llama fused")),
    "unfused": Chain(features=("sp", "tp|dp"), families=("two tokens unfused", "llama unfused")),
    "dtensor": Chain(features=("tp", "tp|dp"), families=("odd", "gpt2 prelu")),
    "average": Chain(features=("average", "average of one"), families=("decoder", "gpt2"), groups=2),
    "outer": Chain(features=("outer",), families=("decoder", "gpt2"), groups=2, outer=True),
}
SCHEDULES = ("1f1b", "interleaved-1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that begins with a feature of a chain and goes on with the next one.

    Each feature is first and second for both families: under every level of ZeRO, both schedules and both launchers.
    """

    chain: str
    place: int  # of the first feature in the chain
    stock: bool  # the second of the families
    kill: bool = False  # a worker of the second part

    def __str__(self) -> str:
        parts = ["-".join(map(str, self.layout(number))) for number in (0, 1)]
        return f"{self.family}-{parts[0]}-then-{parts[1]}".replace(" ", "_") + "-kill" * self.kill

    @property
    def family(self) -> str:
        return CHAINS[self.chain].families[self.stock]

    def layout(self, number: int) -> tuple[str, int, str, str]:
        """Return the feature, the ZeRO level, the schedule and the launcher of the first or the second part."""
        features = CHAINS[self.chain].features
        name = features[(self.place + number) % len(features)]
        zeros = FEATURES[name].zeros
        fixed = FAMILIES[self.family].stages is not None
        schedule = SCHEDULES[0 if fixed else (number + self.stock + self.place) % 2]
        on = ("local", "torchrun")[(number + self.stock) % 2]
        return name, zeros[(self.place + 2 * self.stock + 2 * number) % len(zeros)], schedule, on

    def devices(self, number: int) -> int:
        """Return how many devices the first or the second part of the run has."""
        return RANKS * FEATURES[self.layout(number)[0]].width


def strategy(case: Case, number: int) -> list[Directive]:
    name, zero, schedule, _ = case.layout(number)
    feature, shape = FEATURES[name], SHAPES[schedule]
    stages, width = RANKS * shape.stages_per_rank, feature.width
    placed = [
        directive
        for stage in range(stages)
        for directive in feature.place(
            FAMILIES[case.family], stage, range(stage % RANKS * width, (stage % RANKS + 1) * width), zero
        )
    ]
    cut = split(at(), parts=MICROBATCHES)
    return [*placed, cut, *shape.orders(RANKS, MICROBATCHES), *feature.last()]


def loader(ways: int = 0) -> Iterable[dict[str, Tensor]]:
    """Return one epoch in a drawn order: three batches. ways: devices for which documents are balanced."""
    every = rows()
    if ways:
        del every["places"]

    def collate(numbers: list[int]) -> dict[str, Tensor]:
        batch = {name: field[numbers] for name, field in every.items()}
        return balance_documents(batch, ways=ways, piece=2) if ways else batch

    draws = torch.Generator().manual_seed(7)
    return DataLoader([*range(SAMPLES)], BATCH, shuffle=True, generator=draws, collate_fn=collate)  # type: ignore[arg-type]


def batches(ways: int = 0) -> Iterator[Batch]:
    """Yield the batches of all steps, epoch after epoch."""
    while True:
        yield from loader(ways)


def held_out(count: int, ways: int = 0) -> dict[str, Tensor]:
    """Return samples for an evaluation."""
    batch = {name: field[5 : 5 + count] for name, field in rows().items()}
    if ways:
        del batch["places"]
    return balance_documents(batch, ways=ways, piece=2) if ways else batch


def measured(
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]], model: nn.Module, batch: Batch
) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, float]]]:
    """Return the loss, and as a metric which samples it was given: bits of a number."""
    ids = batch["id"]
    return loss(model, batch), {"samples": ((2.0 ** ids.double()).sum(), float(len(ids)))}


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        params, lr=1e-2, eps=1e-3
    )  # a gradient that is zero but for rounding moves nothing


def falling(step: int) -> float:
    return 1 / (1 + step / 10)


def scheduler(kill: Path | None, driver: int, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Let the rate fall. kill: the first worker that comes to a step writes this file and ends itself.

    driver: the process that tries the scheduler when it compiles.
    """

    def rate(step: int) -> float:
        if kill is not None and step == KILLED and os.getpid() != driver:
            try:
                kill.touch(exist_ok=False)
            except FileExistsError:
                pass  # one was killed here
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return falling(step)

    return LambdaLR(optimizer, rate)


class Noted(Callback):
    """Writes the numbers of a run into its folder, and in the end its state and a prediction."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_step(self, run: Running, step: int, result: StepNumbers) -> None:
        self.write(run, {"step": step, "loss": result.loss, "norm": result.grad_norm, **result.metrics})

    def on_evaluate(self, run: Running, step: int, result: Numbers) -> None:
        self.write(run, {"evaluated": step, "loss": result.loss, **result.metrics})

    def write(self, run: Running, numbers: dict[str, float]) -> None:
        with (run.folder / "notes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")

    def on_end(self, run: Running, step: int) -> None:
        if step < STEPS:
            return
        assert isinstance(run, piper.Run)
        ways = CHAINS[self.case.chain].ways
        rows = run.predict(held_out(5, ways), FAMILIES[self.case.family].forward)
        if ways:  # rows are in the order of the batch that was balanced
            places = held_out(5, ways)["places"]
            rows = rows.gather(1, places.argsort(1)[..., None].expand_as(rows))
        torch.save({"state": run.state_dict(), "predicted": rows}, run.folder / "end.pt")


def job(case: Case, number: int, kill: Path | None = None) -> piper.Job:
    """Return the job of the first or the second part of a run."""
    family = FAMILIES[case.family]
    stages = RANKS * SHAPES[case.layout(number)[2]].stages_per_rank
    ways = CHAINS[case.chain].ways
    return piper.Job(
        model=partial(family.build, stages),
        loss=partial(measured, family.loss),
        data=partial(loader, ways),
        strategy=strategy(case, number),
        optimizer=adamw,
        scheduler=partial(scheduler, kill if case.kill and number else None, os.getpid()),
        clip_norm=CLIP,
        precision="fp64",
        evaluate=piper.Evaluate(data=lambda: [held_out(6, ways)], every=2),
        checkpoint=piper.Checkpoint(folder="checkpoints", every=2),
        callbacks=[Noted(case)],
        steps=STEPS if number else STOP,
    )
