"""Jobs for the runtime's tests: a case of the zoo under a schedule, replicas, shards and experts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    capacity: float | None = None  # of the blocks in which rows travel to experts
    rows: int = 2  # samples in a slice
    clip: float | None = None
    bucket_mb: float | None = None
    keep: str = "use"
    within: int | None = None  # devices of a group for ZeRO
    optimizer_within: int | None = None  # and of one that shares the optimizer's state
    optimizer: str = "adamw"
    reduce: str = "fp32"  # the type in which gradients travel, where they are not fp64
    mask: str = ""  # of attention, beside the causal one: "padding" or "documents"

    def __str__(self) -> str:
        text = f"{self.case}-{self.schedule}-dp{self.dp}-zero{self.zero}-mb{self.parts}"
        text += f"-within{self.within}" if self.within else ""
        text += f"-owners{self.optimizer_within}" if self.optimizer_within else ""
        text += f"-{self.optimizer}" if self.optimizer != "adamw" else ""
        text += f"-{self.mask}" if self.mask else ""
        text += f"-reduce{self.reduce}" if self.reduce != "fp32" else ""
        text += f"-ways{self.ways}" if self.ways > 1 else ""
        text += f"-capacity{self.capacity:g}" if self.capacity else ""
        return text + ("-clip" if self.clip else "")


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def muon(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon([tensor for tensor in params if tensor.dim() == 2], lr=1e-2)


def adafactor(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    # It divides by the root of a mean square: with its own eps, gradients that are zero but for rounding (of biases of keys) would
    # move a parameter as far as others do.
    return torch.optim.Adafactor(params, lr=1e-2, eps=(1e-8, 1e-3))


OPTIMIZERS: Mapping[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    made.__name__: made for made in (sgd, adamw, muon, adafactor)
}  # the last two need whole tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a schedule lays stages over ranks."""

    stages_per_rank: int
    rank_of: Callable[[int, int], int]  # (stage, ranks)
    orders: Callable[[int, int], list[Directive]]  # (ranks, parts)
    both_ways: bool = False  # the second half of the microbatches goes the other way


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
DUALPIPE = Shape(
    stages_per_rank=1, rank_of=straight, orders=lambda r, m: [*schedules.dualpipe(r, m)], both_ways=True
)
RANKS = 2


def shape_of(cell: Cell) -> Shape:
    return DUALPIPE if cell.schedule == "dualpipe" else SHAPES[cell.schedule]


def case_of(cell: Cell) -> zoo.Case:
    shape = shape_of(cell)
    case = case_at(cell.case, None)
    fixed = shape.stages_per_rank > 1 or (shape.both_ways and case.stages % 2)
    return case_at(cell.case, RANKS * shape.stages_per_rank if fixed else None, cell.mask)


@cache
def case_at(name: str, stages: int | None, mask: str = "") -> zoo.Case:
    """A case of the zoo, always the same object: what is captured of it can be kept."""
    return zoo.masked(zoo.case(name, stages), mask) if mask else zoo.case(name, stages)


def strategy(cell: Cell) -> list[Directive]:
    """Stages over ranks, each rank `dp` devices."""
    shape, stages = shape_of(cell), case_of(cell).stages
    ranks = stages // shape.stages_per_rank
    placed = [
        directive
        for stage in range(stages)
        for parts, rank in homes(cell, shape, stage, ranks)
        for directive in on_rank(cell, stage, parts, rank)
    ]
    if cell.parts == 1:
        return placed
    cut, orders = split(at(), parts=cell.parts), shape.orders(ranks, cell.parts)
    return [cut, *placed, *orders] if shape.both_ways else [*placed, cut, *orders]


def homes(cell: Cell, shape: Shape, stage: int, ranks: int) -> list[tuple[range | None, int]]:
    """The ranks of a stage, each with the microbatches that it runs there."""
    rank, half = shape.rank_of(stage, ranks), cell.parts // 2
    if not shape.both_ways:
        return [(None, rank)]
    return [(range(half), rank), (range(half, cell.parts), ranks - 1 - rank)]


def on_rank(cell: Cell, stage: int, parts: range | None, rank: int) -> Iterator[Directive]:
    """A stage, or some microbatches of it, on the devices of a rank."""
    devices = [*range(rank * cell.dp, (rank + 1) * cell.dp)]
    yield replicate(
        at(PP=stage) if parts is None else at(PP=stage, MB=parts),
        devices,
        zero=cell.zero,
        bucket_mb=cell.bucket_mb,
        keep=cell.keep,
        reduce=cell.reduce,
        within=cell.within,
        optimizer_within=cell.optimizer_within,
    )
    if cell.ways > 1:
        experts = at(PP=stage, EP="*") if parts is None else at(PP=stage, EP="*", MB=parts)
        yield shard(experts, devices, ways=cell.ways, capacity=cell.capacity)


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
        "optimizer": OPTIMIZERS[cell.optimizer],
        "precision": "fp64",
        "clip_norm": cell.clip,
    }
    return Job(**(fields | changes))  # type: ignore[arg-type]
