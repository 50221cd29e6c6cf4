"""Chains of stages under a schedule, lowered to plans, for tests of the simulator."""

from collections.abc import Callable, Sequence

from piper import at, replicate, split
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.lower.state import LoweringState
from piper.plan.plan import Plans
from tests.chain import chain
from tests.lower.lowering import lower

Schedule = Callable[[int, int], Sequence[Directive]]


def pipeline(
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int = 1,
    v_shape: bool = False,
    both_ways: bool = False,
    replicas: int = 1,
    zero: int = 0,
    width: int = 1024,
) -> tuple[Plans, CapturedModel, LoweringState]:
    """A chain whose stages go round the ranks, there and back in a V, or both ways at once."""
    stages = ranks * stages_per_rank
    strategy: list[Directive] = []
    for stage in range(stages):
        rank = min(stage, stages - 1 - stage) if v_shape else stage % ranks
        devices = range(rank * replicas, (rank + 1) * replicas)
        if not both_ways:
            strategy.append(replicate(at(PP=stage), devices, zero=zero))
            continue
        half, back = microbatches // 2, (ranks - 1 - rank) * replicas
        strategy.append(replicate(at(PP=stage, MB=range(half)), devices, zero=zero))
        other = replicate(at(PP=stage, MB=range(half, microbatches)), range(back, back + replicas), zero=zero)
        strategy.append(other)
    cut = split(at(), parts=microbatches)
    strategy = [cut, *strategy] if both_ways else [*strategy, cut]
    strategy += schedule(ranks, microbatches)
    outline = chain(stages, width=width)
    plans, work = lower(apply(start(outline), strategy))
    return plans, outline, work
