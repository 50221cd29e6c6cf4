"""Compositions: a schedule, replicas, ZeRO, experts and tied parameters, on a chain."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from piper import schedules
from piper.directives import Directive, apply, remat, replicate, shard, split
from piper.directives.order import Order
from piper.ir.graph import Graph, start
from piper.ir.select import at
from piper.plan.plan import Plans
from tests.chain import chain
from tests.covering import Choices, covering
from tests.lower.lowering import lower

Layout = Callable[[int, int], int]  # (stage, ranks) -> rank
EXPERTS = 4


def straight(stage: int, ranks: int) -> int:
    return stage


def looped(stage: int, ranks: int) -> int:
    return stage % ranks


def folded(stage: int, ranks: int) -> int:
    return min(stage, 2 * ranks - 1 - stage)


SCHEDULES: dict[str, tuple[Callable[[int, int], list[Order]], int, Layout]] = {
    "gpipe": (schedules.gpipe, 1, straight),
    "1f1b": (schedules.one_f_one_b, 1, straight),
    "interleaved-1f1b": (schedules.interleaved_1f1b, 2, looped),
    "zero-bubble": (schedules.zero_bubble, 1, straight),
    "interleaved-zero-bubble": (schedules.interleaved_zero_bubble, 2, looped),
    "zbv": (schedules.zbv, 2, folded),
    "dualpipe-v": (schedules.dualpipe_v, 2, folded),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """One cell of the matrix."""

    schedule: str
    ranks: int
    dp: int
    zero: int
    ways: int  # 0: no experts
    tied: bool
    again: bool = False  # every stage keeps only what comes into it

    def __str__(self) -> str:
        experts = f"-ep{self.ways}" if self.ways else ""
        more = f"{'-tied' if self.tied else ''}{'-again' if self.again else ''}"
        return f"{self.schedule}-pp{self.ranks}-dp{self.dp}-zero{self.zero}{experts}{more}"

    def graph(self) -> Graph:
        """The chain with the whole strategy applied."""
        build, each, rank_of = SCHEDULES[self.schedule]
        stages, parts = self.ranks * each, 2 * self.ranks
        strategy: list[Directive] = []
        for stage in range(stages):
            first = rank_of(stage, self.ranks) * self.dp
            devices = range(first, first + self.dp)
            strategy.append(replicate(at(PP=stage), devices, zero=self.zero))
            if self.ways:
                strategy.append(shard(at(PP=stage, EP="*"), devices, ways=self.ways))
        strategy.append(split(at(), parts=parts))
        strategy += build(self.ranks, parts)
        strategy += [remat(at(), 0.5, across="PP")] if self.again else []
        outline = chain(stages, width=8, experts=EXPERTS if self.ways else 0, tied=self.tied, layers=2)
        return apply(start(outline), strategy)

    def plans(self) -> tuple[Plans, Graph]:
        plans, work = lower(self.graph())
        return plans, work.graph


def every() -> list[Composition]:
    """The whole matrix. Experts are divided over all replicas, or over groups of them."""
    return [
        Composition(schedule=schedule, ranks=ranks, dp=dp, zero=zero, ways=ways, tied=tied)
        for schedule in SCHEDULES
        for ranks in (2, 3, 4)
        for dp in (1, 2, 4)
        for zero in range(4)
        for ways in sorted({0, 1, 2, dp} if dp == 4 else {0, dp})
        for tied in (False, True)
    ]


def choices(cell: Composition) -> Choices:
    """Return what a composition chooses on each axis of the matrix."""
    return {name: getattr(cell, name) for name in ("schedule", "ranks", "dp", "zero", "ways", "tied")}


@cache
def pairwise() -> list[Composition]:
    """A selection in which every two values of two different axes meet at least once."""
    return covering(every(), choices)


@cache
def by_threes() -> list[Composition]:
    """A selection in which every three values of three different axes meet that do not meet in `pairwise`."""
    return covering(every(), choices, 3, given=pairwise())
