"""Compositions for at most four ranks: schedules, replicas, shards, experts, tensors, sequences, and what else a job may ask."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from piper import schedules
from piper.directives import Directive, average, offload, place, remat, replicate, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.runtime.worker import Options
from tests import test_length_moves, test_length_strategies
from tests.runtime import (
    averaging,
    divided,
    moving,
    test_averages,
    test_expert_blocks,
    test_fp8,
    test_full_updates,
    test_packed,
    test_two_axes,
)
from tests.runtime.grid import Cell, batches, case_at, case_of, job, strategy

MOST = 4  # ranks
TIGHT = 1e-9  # of float64
COMPILED = 1e-6  # the models' rotations are float32, and a compiled cosine rounds another way
PLAIN = Options()
Batches = list[dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A job on ranks, and how close it must come to plain PyTorch on one device."""

    name: str
    group: str  # of trials that share captures: one process of a parallel run has them
    job: Callable[[], Job]
    batches: Callable[[], Batches]
    options: Options = PLAIN
    compiled: bool = False
    tol: float = TIGHT

    def __str__(self) -> str:
        return self.name


def momentum(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def of_cell(
    cell: Cell,
    *more: Directive,
    name: str = "",
    instead: list[Directive] | None = None,
    options: Options = PLAIN,
    compiled: bool = False,
) -> Trial:
    """Return a trial of a cell; `more`: further directives. `instead`: of those that the cell makes."""
    changes: dict[str, object] = {"strategy": [*(strategy(cell) if instead is None else instead), *more]}
    if compiled:
        changes["optimizer"] = momentum
    return Trial(
        name=f"{cell}{'-' if name else ''}{name}",
        group=f"{cell.case}-{case_of(cell).stages}{'-compiled' if compiled else ''}",
        job=partial(job, cell, **changes),
        batches=partial(batches, cell, 2),
        options=options,
        compiled=compiled,
        tol=COMPILED if compiled else TIGHT,
    )


def of_divided(model: str, name: str) -> Trial:
    """Return a trial of divided chunks."""
    stages = divided.STRATEGIES[name][0]
    return Trial(
        name=f"{model}-{name}",
        group=f"divided-{model}-{stages}",
        job=partial(divided.job, model, name),
        batches=divided.batches,
    )


CELLS = [
    # Schedules and what replicas shard
    Cell(case="mlp", schedule="gpipe", dp=2, zero=0, clip=0.3),
    Cell(case="decoder", schedule="gpipe", dp=2, zero=3),
    Cell(case="decoder", schedule="1f1b", dp=1, parts=4),
    Cell(case="decoder", schedule="1f1b", dp=2, zero=1, clip=0.3),
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=2),
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, bucket_mb=0.02),
    Cell(case="sum_weight", schedule="1f1b", dp=2, zero=1, clip=0.3, rows=1),
    Cell(case="decoder", schedule="zero-bubble", dp=1, parts=4, clip=0.3),
    Cell(case="decoder", schedule="zero-bubble", dp=2, zero=2),
    Cell(case="decoder", schedule="interleaved-1f1b", dp=1, parts=4),
    Cell(case="decoder", schedule="interleaved-1f1b", dp=2, zero=3),
    Cell(case="decoder", schedule="interleaved-zero-bubble", dp=2, zero=1),
    Cell(case="decoder", schedule="zbv", dp=1, parts=4),
    Cell(case="decoder", schedule="zbv", dp=2, zero=2),
    Cell(case="decoder", schedule="dualpipe-v", dp=1, parts=4),
    Cell(case="decoder", schedule="dualpipe-v", dp=2, zero=3, parts=4, rows=1),
    Cell(case="decoder", schedule="dualpipe", dp=1, parts=4),
    Cell(case="decoder_untied", schedule="dualpipe", dp=2, zero=0, parts=4, rows=1),
    Cell(case="decoder_untied", schedule="dualpipe", dp=2, zero=3, parts=4, rows=1),
    # Experts
    Cell(case="moe", schedule="none", dp=2, zero=3, ways=2, rows=1),
    Cell(case="moe", schedule="1f1b", dp=2, zero=0, ways=2, rows=1),
    Cell(case="moe", schedule="zbv", dp=2, zero=2, ways=2, rows=1),
    Cell(case="moe", schedule="dualpipe-v", dp=2, zero=3, parts=4, ways=2, rows=1),
    Cell(case="moe", schedule="dualpipe", dp=2, zero=2, parts=4, ways=2, rows=1),
    # Other models
    Cell(case="convnet", schedule="1f1b", dp=2, zero=1),  # buffers that follow the first replica
    Cell(case="convnet", schedule="zero-bubble", dp=2, zero=3),
    Cell(case="dropout", schedule="zero-bubble", dp=2, zero=2),
    Cell(case="encoder_decoder", schedule="gpipe", dp=1),  # three stages
    Cell(case="frozen", schedule="1f1b", dp=2, zero=3),
    Cell(case="llama_hf", schedule="1f1b", dp=2, zero=2),
]


def replicas(case: str, dp: int, zero: int, ways: int = 1) -> Trial:
    """Return a trial of whole models on some devices, with experts divided over `ways` of them."""
    cell, devices = Cell(case=case, schedule="none", dp=dp, zero=zero, rows=1, ways=ways), [*range(dp)]
    divides = [shard(at(EP="*"), devices, ways=ways)] if ways > 1 else []
    return of_cell(
        cell, instead=[replicate(at(), devices, zero=zero), *divides, split(at(), parts=2)], name="whole"
    )


def in_line(
    case: str, schedule: str, orders: Callable[[int, int], Iterable[Directive]], parts: int, per_rank: int = 1
) -> Trial:
    """Return a trial of a pipeline over four ranks, of which each has `per_rank` stages."""
    stages = MOST * per_rank
    taken = case_at(case, stages)
    both_ways = schedule == "dualpipe"
    placed: list[Directive] = []
    for stage in range(stages):
        rank = stage if stage < MOST else 2 * MOST - 1 - stage  # folded, where a rank has two
        if both_ways:
            placed.append(place(at(PP=stage, MB=range(parts // 2)), [rank]))
            placed.append(place(at(PP=stage, MB=range(parts // 2, parts)), [MOST - 1 - rank]))
        else:
            placed.append(place(at(PP=stage), [rank]))
    cut = split(at(), parts=parts)
    order = [*orders(MOST, parts)]

    def make() -> Job:
        return Job(
            model=taken.model,
            loss=taken.loss,
            data=lambda: [taken.batch(2 * parts, 0)],
            strategy=[cut, *placed, *order] if both_ways else [*placed, cut, *order],
            precision="fp64",
            clip_norm=0.3,
            optimizer=momentum,
        )

    return Trial(
        name=f"{case}-{schedule}-pp4-mb{parts}",
        group=f"{case}-{stages}",
        job=make,
        batches=lambda: [taken.batch(2 * parts, seed) for seed in range(2)],
    )


LINES = [
    in_line("mlp", "gpipe", schedules.gpipe, 4),
    in_line("decoder", "1f1b", schedules.one_f_one_b, 8),
    in_line("decoder", "zero-bubble", schedules.zero_bubble, 4),
    in_line("mlp", "zbv", schedules.zbv, 8, per_rank=2),
    in_line("mlp", "dualpipe-v", schedules.dualpipe_v, 8, per_rank=2),
    in_line("decoder", "dualpipe", schedules.dualpipe, 8),
]
DIVIDED = [
    *(("decoder", name) for name in ("tp2", "sp2", "cp2", "cp2zigzag", "cp2heads", "cp4")),
    ("decoder4", "tp4"),
    *(("decoder", f"tp2dp2{zero}") for zero in ("", "z1", "z2", "z3")),
    *(("decoder", name) for name in ("tp2pp2", "tp2zb", "tp2zbv", "tp2dualpipev")),
    *(("moe", name) for name in ("tp2ep2", "sp2ep2", "sp2ep4", "sp4ep2", "cp2ep4", "cp4ep2")),
]


def ring(ways: int) -> Trial:
    """Return a trial of attention whose keys and values go round."""
    made = partial(divided.job_of, "decoder", 1, lambda _: divided.context(ways, "ring", "zigzag"))
    return Trial(name=f"decoder-cp{ways}ring", group="divided-decoder-1", job=made, batches=divided.batches)


SHARDED = Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3)
EXPERTS = Cell(case="moe", schedule="1f1b", dp=2, zero=2, ways=2, rows=1)
LONG = Cell(case="decoder", schedule="gpipe", dp=2, zero=3, parts=4, clip=0.3)
OPTIONS = [
    of_cell(SHARDED, remat(at(), 0.5, across="PP"), name="again"),
    of_cell(EXPERTS, remat(at(), 0.5, across="PP"), name="again"),
    of_cell(SHARDED, remat(at(), 0.25), name="remat"),
    of_cell(LONG, offload(at(), least_mb=0), name="offload"),
    of_cell(Cell(case="decoder", schedule="zbv", parts=4), offload(at(), least_mb=0), name="offload"),
    of_cell(LONG, offload(at(), what="optimizer"), name="optimizer"),
    of_cell(SHARDED, options=Options(streams=False), name="one-stream"),
    of_cell(EXPERTS, options=Options(streams=False), name="one-stream"),
]
COMPILED_TRIALS = [
    of_cell(Cell(case="decoder", schedule="zero-bubble", parts=4), compiled=True, name="compiled"),
    of_cell(Cell(case="decoder", schedule="1f1b", dp=2, zero=3), compiled=True, name="compiled"),
    of_cell(Cell(case="moe", schedule="1f1b", dp=2, ways=2), compiled=True, name="compiled"),
]


def rounded(name: str, narrow: Directive) -> Trial:
    """Return a trial of products in fp8."""
    return Trial(
        name=f"fp8-{name}",
        group="fp8",
        job=lambda: test_fp8.job(*test_fp8.pairs(3), narrow),
        batches=test_fp8.data,
    )


def of_sizes(cell: Cell, *sizes: int) -> Trial:
    """Return a trial of batches of several sizes."""

    def given() -> Batches:
        rows = zip(sizes, batches(cell, len(sizes)), strict=True)
        return [{name: value[:size] for name, value in batch.items()} for size, batch in rows]

    return replace(of_cell(cell, name="sizes"), batches=given)


def of_job(name: str, group: str, make: Callable[[], Job]) -> Trial:
    """Return a trial of a job, on its own data."""
    return Trial(
        name=name, group=group, job=make, batches=lambda: [dict(batch) for batch in make().data()][:6]
    )


def within(case: str, zero: int, optimizer_within: int | None = None) -> Trial:
    """Return a trial of two replicas of groups of two that shard by ZeRO."""
    cell = Cell(case=case, schedule="none", dp=4, zero=zero, rows=1, clip=0.3)
    groups = replicate(at(), range(4), zero=zero, within=2, optimizer_within=optimizer_within)
    return of_cell(cell, instead=[groups, split(at(), parts=2)], name=f"within-2-{optimizer_within}")


def apart(name: str, strategy: list[Directive]) -> Trial:
    """Return a trial of groups that train apart and average."""
    return of_job(f"average-{name}", "average", partial(averaging.job, *strategy, clip=0.05))


def packed(kind: str, strategy: str) -> Trial:
    """Return a trial of packed documents."""
    made = partial(test_packed.job, kind, "several", strategy)
    return of_job(f"packed-{kind}-{strategy.replace(' ', '-')}", f"packed-{kind}", made)


def two_axes(name: str) -> Trial:
    """Return a trial of two axes that cut the same dimension."""

    def make() -> Job:
        strategy = test_two_axes.STRATEGIES[name]
        return Job(
            model=test_two_axes.Net,
            loss=test_two_axes.loss,
            data=test_two_axes.data,
            strategy=strategy,
            optimizer=momentum,
            precision="fp64",
        )

    return of_job(f"two-axes-{name.replace(' ', '-')}", "two-axes", make)


def narrow_shards(model: str, strategy: str) -> Trial:
    """Return a trial of products in fp8 of a divided model."""

    def make() -> Job:
        made = divided.job(model, strategy)
        return replace(made, strategy=[*made.strategy, test_fp8.FP8])  # type: ignore[misc]

    return replace(of_job(f"fp8-{model}-{strategy}", "fp8", make), batches=divided.batches)


def full_update(model: str, strategy: str, optimizer: str) -> Trial:
    """Return a trial of an optimizer that needs whole tensors where they are sharded."""
    made = partial(test_full_updates.job, model, strategy, optimizer)
    trial = of_job(f"{optimizer}-{model}-{strategy}", f"divided-{model}-{optimizer}", made)
    return replace(trial, batches=divided.batches)


def moving_experts(zero: int) -> Job:
    """Return a job whose experts have clones on other devices."""
    return Job(
        model=moving.Mixture,
        loss=moving.loss,
        data=lambda: moving.batches(3),
        strategy=moving.cloned(zero=zero),
        optimizer=moving.adam,
        precision="fp64",
    )


def expert_blocks(capacity: float, zero: int) -> Job:
    """Return a job whose rows travel to experts in blocks, which they exceed in some steps."""
    return Job(
        model=test_expert_blocks.Mixture,
        loss=moving.loss,
        data=lambda: test_expert_blocks.batches(6),
        strategy=[*test_expert_blocks.blocks(capacity, zero=zero), test_expert_blocks.MICROBATCHES],
        optimizer=moving.adam,
        precision="fp64",
        clip_norm=0.3,
    )


def by_length(name: str) -> Trial:
    """Return a trial of strategies for several lengths: the state moves between their layouts."""
    given = partial(test_length_moves.batches, 6)
    strategy = test_length_moves.LAYOUTS[name]
    return Trial(
        name=f"lengths-{name.replace(' ', '-')}",
        group="lengths",
        job=lambda: test_length_strategies.job(given(), strategy=strategy),
        batches=given,
    )


OUTER = {"lr": 0.7, "momentum": 0.5}
WHOLE = [
    within("mlp", 3),
    within("decoder_untied", 2),
    within("decoder_untied", 3, optimizer_within=4),
    apart("zero3", test_averages.zero(3)),
    apart("pipeline", test_averages.PIPELINE),
    apart(
        "behind", [*test_averages.zero(1)[1:], average(at(), across=[0, 2], every=3, outer=OUTER, overlap=1)]
    ),
    *(packed("flex", name) for name in ("1f1b", "tp", "gather4 zigzag", "heads", "ring4 zigzag", "tp ring")),
    packed("sdpa", "tp gather"),
    two_axes("weights"),
    two_axes("the sequence"),
    *(of_job(f"clones-zero{zero}", "clones", partial(moving_experts, zero)) for zero in (0, 2)),
    *(of_job(f"blocks-{c:g}-zero{z}", "blocks", partial(expert_blocks, c, z)) for c, z in ((4, 0), (2, 3))),
    *map(by_length, test_length_moves.LAYOUTS),
    full_update("decoder", "tp2dp2z3", "muon"),
    full_update("decoder", "tp2pp2", "adafactor"),
    full_update("moe", "sp2ep2", "adafactor"),
    narrow_shards("decoder", "sp2"),
    narrow_shards("moe", "cp2ep4"),
]
TRIALS = [
    *map(of_cell, CELLS),
    replicas("mlp", 3, 3),  # shards that three devices cannot share evenly
    replicas("decoder_untied", 3, 2),
    replicas("moe", 4, 3, ways=4),
    replicas("moe", 3, 1),
    *LINES,
    *(of_divided(model, name) for model, name in DIVIDED),
    ring(2),
    ring(4),
    *OPTIONS,
    *COMPILED_TRIALS,
    *WHOLE,
    rounded("products", test_fp8.FP8),
    rounded("gathers", test_fp8.GATHERED),
    of_sizes(Cell(case="decoder", schedule="1f1b", dp=2, zero=3, rows=1), 4, 3, 4, 2),
    of_sizes(Cell(case="convnet", schedule="1f1b", dp=2, zero=1), 8, 4, 8),
]
