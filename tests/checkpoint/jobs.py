"""Jobs for the tests of checkpoints: one model under several strategies, and what training leaves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.directives import Directive, place, replicate, shard, split
from piper.ir.dtypes import JobPrecision
from piper.ir.select import at
from piper.models import decoder
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import zoo
from tests.runtime.grid import Cell, job
from tests.runtime.sharing import Shared

ROWS = 8


@cache
def case(name: str) -> zoo.Case:
    """A case of the zoo with as few layers as its strategies need; always the same, so captures can be kept."""
    match name:
        case "decoder":
            config = decoder.Config.tiny(layers=4, stages=4, tied=True)
            return replace(zoo.case("decoder", 4), model=lambda: decoder.Decoder(config))
        case "frozen":
            made = zoo.case("mlp", 4)
            return replace(made, model=lambda: zoo.freeze(made.model(), "layers.0", "layers.3.bias"))
        case "mlp" | "dropout":
            return zoo.case(name, 4)
    return zoo.case(name)


def pp2_dp2(stages: int, zero: int, ways: int = 1) -> list[Directive]:
    """The stages on two ranks of two devices."""
    made: list[Directive] = []
    for stage in range(stages):
        rank = 2 * stage // stages
        devices = [2 * rank, 2 * rank + 1]
        made.append(replicate(at(PP=stage), devices, zero=zero, bucket_mb=0.02))
        if ways > 1:
            made.append(shard(at(PP=stage, EP="*"), devices, ways=ways))
    return [*made, split(at(), parts=2)]


def dp(count: int, zero: int = 0) -> list[Directive]:
    return [replicate(at(), [*range(count)], zero=zero)]


def strategy(name: str, stages: int) -> list[Directive]:
    """A strategy for a model of so many stages. All cut the samples alike, so one capture serves them."""
    found: dict[str, list[Directive]] = {
        "one": [split(at(), parts=4)],
        "dp2": [*dp(2), split(at(), parts=2)],
        "dp4": dp(4),
        "dp4-zero1": dp(4, zero=1),
        "dp4-zero2": dp(4, zero=2),
        "dp4-groups-zero3": [replicate(at(), [*range(4)], zero=3, within=2, bucket_mb=0.02)],
        "dp4-owners-zero3": [
            replicate(at(), [*range(4)], zero=3, within=2, optimizer_within=4, bucket_mb=0.02)
        ],
        "pp": [*(place(at(PP=stage), [stage]) for stage in range(stages)), split(at(), parts=4)],
        "pp2-dp2-zero0": pp2_dp2(stages, 0),
        "pp2-dp2-zero1": pp2_dp2(stages, 1),
        "pp2-dp2-zero3": pp2_dp2(stages, 3),
        "pp2-ep2-zero3": pp2_dp2(stages, 3, ways=2),
        "ep4": [replicate(at(), [0, 1, 2, 3], zero=1), shard(at(EP="*"), [0, 1, 2, 3], ways=4)],
        "ep2-dp4-zero2": [replicate(at(), [0, 1, 2, 3], zero=2), shard(at(EP="*"), [0, 1, 2, 3], ways=2)],
    }
    return found[name]


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def nadam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        ],
        milestones=[2],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is trained; an optimizer of none is AdamW."""

    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    precision: JobPrecision = "fp64"
    clip_norm: float | None = None


SETTINGS = {
    "adamw": Settings(),
    "sgd": Settings(optimizer=sgd, scheduler=cosine),
    "nadam": Settings(optimizer=nadam, clip_norm=0.3),
    "bf16": Settings(precision="bf16"),
}


@cache
def captures(model: str) -> Shared:
    """What the programs of a model share."""
    return Shared()


@cache
def compiled(model: str, name: str, precision: JobPrecision, clip_norm: float | None) -> Program:
    """A model under a strategy, compiled once for all tests."""
    made = case(model)
    with captures(model).capturing():
        return compile(
            job(
                Cell(case="mlp"),
                model=made.model,
                loss=made.loss,
                data=lambda: [made.batch(ROWS, 0)],
                strategy=strategy(name, made.stages),
                precision=precision,
                clip_norm=clip_norm,
            )
        )


def program(model: str, name: str, settings: str = "adamw") -> Program:
    """A model under a strategy; how it is trained is not part of what is compiled."""
    given = SETTINGS[settings]
    made = compiled(model, name, given.precision, given.clip_norm)
    if given.optimizer is not None:
        made = replace(made, job=replace(made.job, optimizer=given.optimizer, scheduler=given.scheduler))
    return made


def batches(model: str, first: int, last: int) -> list[zoo.Batch]:
    return [case(model).batch(ROWS, seed) for seed in range(first, last)]


def train_and_save(
    made: Program, given: Sequence[zoo.Batch], at_step: int, path: Path
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train with a save on the way: the losses after it, the state when it was made, and the last state."""
    with launch_inline(made) as run:
        for batch in given[:at_step]:
            run.step(batch)
        run.save(path, data={"seen": at_step})
        saved = run.state_dict()
        return [run.step(batch).loss for batch in given[at_step:]], saved, run.state_dict()


def resume(
    made: Program, given: Sequence[zoo.Batch], path: Path, *, blank: bool = True
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Go on from a checkpoint: the losses, the state at first, and the last state."""
    with launch_inline(made, Options(blank=blank)) as run:
        assert run.load(path).data == {"seen": 2}
        loaded = run.state_dict()
        return [run.step(batch).loss for batch in given], loaded, run.state_dict()


def equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )
