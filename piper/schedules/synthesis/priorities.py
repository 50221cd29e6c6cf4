"""Priorities that a greedy schedule can follow, smallest first: rules like those of the known schedules."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from piper.schedules.synthesis.problem import F, I, Problem, W

Rule = Callable[[int, int, int], tuple[float, float, float]]  # (kind, stage, microbatch) -> rank among all


def priorities(problem: Problem) -> Iterator[list[float]]:
    """Yield one list of priorities for each rule."""
    for rule in rules(problem.stages):
        ranked = sorted(
            range(problem.size),
            key=lambda operation: rule(
                problem.kind[operation], problem.stage[operation], problem.microbatch[operation]
            ),
        )
        priority = [0.0] * problem.size
        for place, operation in enumerate(ranked):
            priority[operation] = float(place)
        yield priority
    yield remaining(problem)
    for slowness in (1.0, 1.5, 2.0, 3.0):
        yield rhythm(problem, slowness)


def rules(stages: int) -> tuple[Rule, ...]:
    """Return rules that order operations by kind first, and by microbatch or stage within a kind."""
    half = stages // 2

    def oldest(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        return (I, F, W).index(kind), microbatch, -stage if kind == F else stage

    def deepest_forward(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        first, second = (-stage, microbatch) if kind == F else (microbatch, stage)
        return (I, F, W).index(kind), first, second

    def deep_forwards_first(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        deep = kind == F and stage >= half
        return 0 if deep else (I, F, W).index(kind) + 1, microbatch, -stage if kind == F else stage

    def shallowest_inputs(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        first, second = (stage, microbatch) if kind == I else (microbatch, -stage)
        return (I, F, W).index(kind), first, second

    def forwards_first(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        return kind, microbatch, -stage if kind == F else stage

    def by_age(kind: int, stage: int, microbatch: int) -> tuple[float, float, float]:
        return microbatch, kind, stage if kind == F else -stage

    return oldest, deepest_forward, deep_forwards_first, shallowest_inputs, forwards_first, by_age


def remaining(problem: Problem) -> list[float]:
    """Put first what has the longest way to the end of its microbatch; BW last."""
    tails = longest_tails(problem)
    period = max(tails) / problem.microbatches
    late = sum(problem.duration)
    return [
        problem.microbatch[operation] * period - tail + (late if problem.kind[operation] == W else 0.0)
        for operation, tail in enumerate(tails)
    ]


def longest_tails(problem: Problem) -> list[float]:
    """Return the longest chain from the start of each operation to the end of its microbatch."""
    tails = [0.0] * problem.size
    for microbatch in range(problem.microbatches):
        stages = range(problem.stages)
        order = [problem.number(kind, stage, microbatch) for stage in stages for kind in (W, I)]
        order += [problem.number(F, stage, microbatch) for stage in reversed(stages)]
        for operation in order:
            following = (tails[reader] + delay for reader, delay in problem.after[operation])
            tails[operation] = problem.duration[operation] + max(following, default=0.0)
    return tails


def rhythm(problem: Problem, slowness: float) -> list[float]:
    """Let a microbatch enter at each beat of the busiest rank, and walk the stages at a steady pace."""
    costs = problem.costs
    stages = range(problem.stages)
    hops = [costs.hop_between(stage, stage + 1) for stage in stages[:-1]]
    down = list(accumulate((costs.forward[stage] + hops[stage] for stage in stages[:-1]), initial=0.0))
    turn = down[-1] + costs.forward[-1]
    up = list(accumulate((costs.inputs[s + 1] + hops[s] for s in reversed(stages[:-1])), initial=0.0))[::-1]
    period = beat(problem)

    def place(operation: int) -> float:
        kind, stage = problem.kind[operation], problem.stage[operation]
        way = down[stage] if kind == F else turn + up[stage]
        late = period * problem.stages * slowness if kind == W else 0.0
        return problem.microbatch[operation] * period + way * slowness + late

    return [place(operation) for operation in range(problem.size)]


def beat(problem: Problem) -> float:
    """Return the time that one microbatch takes on the busiest rank."""
    work = [0.0] * problem.ranks
    for operation, time in enumerate(problem.duration):
        work[problem.rank[operation]] += time
    return max(work) / problem.microbatches
