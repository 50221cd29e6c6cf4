"""Greedy rules, and building blocks: one microbatch's way through the pipeline, repeated at every beat.

How steeply a pass walks the ranks and how long it pauses where it turns decides how long activations live,
and so how much memory the schedule needs (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from piper.schedules.synthesis.list_schedulers import F, I, Problem, W

Rule = Callable[[int, int, int], tuple[float, float, float]]  # (kind, stage, microbatch) -> rank among all


def priorities(problem: Problem) -> Iterator[list[float]]:
    """Yield one list of priorities for each rule."""
    for rule in rules(problem.stages):
        keys = list(map(rule, problem.kind, problem.stage, problem.microbatch))
        place = {key: float(number) for number, key in enumerate(sorted(keys))}
        yield [place[key] for key in keys]
    yield remaining(problem)
    for slowness in (1.0, 1.5, 2.0, 3.0):
        yield rhythm(problem, slowness)


def rules(stages: int) -> tuple[Rule, ...]:
    """Return rules that order operations by kind first, and by microbatch or stage within a kind."""
    half, place = stages // 2, (I, F, W).index
    return (
        # the oldest microbatch
        lambda kind, stage, number: (place(kind), number, -stage if kind == F else stage),
        # the deepest forward
        lambda kind, stage, number: (place(kind), *((-stage, number) if kind == F else (number, stage))),
        # deep forwards before all else
        lambda kind, stage, number: (
            0 if kind == F and stage >= half else place(kind) + 1,
            number,
            -stage if kind == F else stage,
        ),
        # the input gradients of the shallowest stage
        lambda kind, stage, number: (place(kind), *((stage, number) if kind == I else (number, -stage))),
        # forwards first
        lambda kind, stage, number: (kind, number, -stage if kind == F else stage),
        # the oldest microbatch, whatever the kind
        lambda kind, stage, number: (number, kind, stage if kind == F else -stage),
    )


def remaining(problem: Problem) -> list[float]:
    """Put first what has the longest way to the end of its microbatch; BW last."""
    tails = [0.0] * problem.size  # the longest chain from the start of each to the end of its microbatch
    for microbatch in range(problem.microbatches):
        stages = range(problem.stages)
        order = [problem.number(kind, stage, microbatch) for stage in stages for kind in (W, I)]
        order += [problem.number(F, stage, microbatch) for stage in reversed(stages)]
        for operation in order:
            following = (tails[reader] + delay for reader, delay in problem.after[operation])
            tails[operation] = problem.duration[operation] + max(following, default=0.0)
    period = max(tails) / problem.microbatches
    late = sum(problem.duration)
    return [
        problem.microbatch[operation] * period - tail + (late if problem.kind[operation] == W else 0.0)
        for operation, tail in enumerate(tails)
    ]


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


SLOPES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
PAUSES = (0.0, 1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildingBlock:
    """How one microbatch moves, in units of the mean operation.

    A slope is the time from one stage to the next: at least the pass itself. The first of a pair holds for
    the way down the ranks, the second for the way up; a loop only goes down, and takes both in turn.
    """

    forward: tuple[float, float] = (1.0, 1.0)
    inputs: tuple[float, float] = (1.0, 1.0)
    at_turns: float = 0.0  # pause where forwards turn
    at_loss: float = 0.0  # pause between the last stage's F and its BI
    at_returns: float = 0.0  # pause where gradients turn


KNOWN = (
    BuildingBlock(),
    BuildingBlock(forward=(2, 1), inputs=(2, 1), at_loss=3, at_returns=1),
    BuildingBlock(forward=(2, 1), inputs=(2, 1), at_returns=1),
    BuildingBlock(forward=(2, 3), inputs=(2, 3), at_returns=1),
    BuildingBlock(forward=(3, 3), inputs=(3, 3), at_loss=1),
    BuildingBlock(forward=(3, 1), inputs=(3, 1)),
    BuildingBlock(at_loss=2),
    BuildingBlock(forward=(2, 1), inputs=(2, 1)),
    BuildingBlock(forward=(2, 2), inputs=(2, 2), at_loss=1),
)


def times_of(problem: Problem, block: BuildingBlock) -> list[float]:
    """Return the times at which a block's repetition would run each F and BI; those of BW are 0."""
    costs, stages, ranks = problem.costs, problem.stages, problem.ranks
    unit = (sum(costs.forward) + sum(costs.inputs) + sum(costs.weights)) / (3 * stages)
    turns = max(1, stages // ranks)

    def hop(stage: int) -> float:
        return costs.hop_between(stage, stage + 1) if stage < stages - 1 else 0.0

    forward, inputs = [0.0] * stages, [0.0] * stages
    now = 0.0
    for stage in range(stages):
        if stage and stage % ranks == 0:
            before = stage - 1
            now = forward[before] + costs.forward[before] + hop(before) + block.at_turns * unit
        forward[stage] = now
        now += max(costs.forward[stage] + hop(stage), unit * block.forward[stage // ranks % 2])
    now = forward[-1] + costs.forward[-1] + block.at_loss * unit
    for stage in reversed(range(stages)):
        if stage < stages - 1 and stage % ranks == ranks - 1:
            now = inputs[stage + 1] + costs.inputs[stage + 1] + hop(stage) + block.at_returns * unit
        inputs[stage] = now
        up = hop(stage - 1) if stage else 0.0
        now += max(costs.inputs[stage] + up, unit * block.inputs[(turns - 1 - stage // ranks) % 2])
    period = beat(problem)
    times = [0.0] * problem.size
    for stage in range(stages):
        for microbatch in range(problem.microbatches):
            times[problem.number(F, stage, microbatch)] = forward[stage] + microbatch * period
            times[problem.number(I, stage, microbatch)] = inputs[stage] + microbatch * period
    return times


def random_block(random: Random) -> BuildingBlock:
    """Return any block."""
    one, two, three, four = random.choices(SLOPES, k=4)
    turns, loss, returns = random.choices(PAUSES, k=3)
    return BuildingBlock(
        forward=(one, two), inputs=(three, four), at_turns=turns, at_loss=loss, at_returns=returns
    )


def neighbour(block: BuildingBlock, random: Random) -> BuildingBlock:
    """Return a block that differs in one slope or pause."""
    slope, pause = random.choice(SLOPES), random.choice(PAUSES)
    neighbours = (
        replace(block, forward=(slope, block.forward[1])),
        replace(block, forward=(block.forward[0], slope)),
        replace(block, inputs=(slope, block.inputs[1])),
        replace(block, inputs=(block.inputs[0], slope)),
        replace(block, at_turns=pause),
        replace(block, at_loss=pause),
        replace(block, at_returns=pause),
    )
    return random.choice(neighbours)
