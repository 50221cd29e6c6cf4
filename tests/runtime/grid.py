"""Jobs for the runtime's tests: a case of the zoo under a schedule, replicas, shards and experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from piper import schedules
from piper.compiler import Program, compile
from piper.directives import Directive, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from tests import zoo


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One composition to try."""

    case: str
    schedule: str = "1f1b"
    dp: int = 1
    zero: int = 0
    parts: int = 2
    ways: int = 1
    rows: int = 2  # samples in a slice
    clip: float | None = None
    bucket_mb: float | None = None

    def __str__(self) -> str:
        text = f"{self.case}-{self.schedule}-dp{self.dp}-zero{self.zero}-mb{self.parts}"
        return text + (f"-ways{self.ways}" if self.ways > 1 else "") + ("-clip" if self.clip else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a schedule lays stages over ranks."""

    stages_per_rank: int
    rank_of: Callable[[int, int], int]  # (stage, ranks)
    orders: Callable[[int, int], list[Directive]]  # (ranks, parts)


def straight(stage: int, ranks: int) -> int:
    return stage % ranks


def folded(stage: int, ranks: int) -> int:
    return stage if stage < ranks else 2 * ranks - 1 - stage


SHAPES: Mapping[str, Shape] = {
    "none": Shape(stages_per_rank=1, rank_of=straight, orders=lambda r, m: []),
    "gpipe": Shape(stages_per_rank=1, rank_of=straight, orders=lambda r, m: [*schedules.gpipe(r, m)]),
    "1f1b": Shape(stages_per_rank=1, rank_of=straight, orders=lambda r, m: [*schedules.one_f_one_b(r, m)]),
    "zero-bubble": Shape(
        stages_per_rank=1, rank_of=straight, orders=lambda r, m: [*schedules.zero_bubble(r, m)]
    ),
    "interleaved-1f1b": Shape(
        stages_per_rank=2, rank_of=straight, orders=lambda r, m: [*schedules.interleaved_1f1b(r, m)]
    ),
    "interleaved-zero-bubble": Shape(
        stages_per_rank=2, rank_of=straight, orders=lambda r, m: [*schedules.interleaved_zero_bubble(r, m)]
    ),
    "zbv": Shape(stages_per_rank=2, rank_of=folded, orders=lambda r, m: [*schedules.zbv(r, m)]),
    "dualpipe-v": Shape(stages_per_rank=2, rank_of=folded, orders=lambda r, m: [*schedules.dualpipe_v(r, m)]),
}
RANKS = 2


def case_of(cell: Cell) -> zoo.Case:
    per_rank = SHAPES[cell.schedule].stages_per_rank
    return case_at(cell.case, RANKS * per_rank if per_rank > 1 else None)


@cache
def case_at(name: str, stages: int | None) -> zoo.Case:
    """A case of the zoo, always the same object: what is captured of it can be kept."""
    return zoo.case(name, stages)


def strategy(cell: Cell) -> list[Directive]:
    """Stages over ranks, each rank `dp` devices."""
    shape, stages = SHAPES[cell.schedule], case_of(cell).stages
    ranks = stages // shape.stages_per_rank
    made: list[Directive] = []
    for stage in range(stages):
        rank = shape.rank_of(stage, ranks)
        devices = range(rank * cell.dp, (rank + 1) * cell.dp)
        made.append(replicate(at(PP=stage), [*devices], zero=cell.zero, bucket_mb=cell.bucket_mb))
        if cell.ways > 1:
            made.append(shard(at(PP=stage, EP="*"), [*devices], ways=cell.ways))
    if cell.parts > 1:
        made.append(split(at(), parts=cell.parts))
        made += shape.orders(ranks, cell.parts)
    return made


def batches(cell: Cell, count: int) -> list[dict[str, Tensor]]:
    return [case_of(cell).batch(cell.dp * cell.parts * cell.rows, seed) for seed in range(count)]


@lru_cache
def compiled(cell: Cell, precision: str = "fp64") -> Program:
    """A cell's program, made once for all the tests that run it."""
    return compile(job(cell, precision=precision))


def job(cell: Cell, **changes: object) -> Job:
    case = case_of(cell)
    fields: dict[str, object] = {
        "model": case.model,
        "loss": case.loss,
        "data": lambda: batches(cell, 1),
        "strategy": strategy(cell),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "precision": "fp64",
        "clip_norm": cell.clip,
    }
    return Job(**(fields | changes))  # type: ignore[arg-type]
