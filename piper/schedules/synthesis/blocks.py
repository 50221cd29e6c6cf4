"""Building blocks: one microbatch's way through the pipeline, repeated at every beat.

How steeply a pass walks the ranks and how long it pauses where it turns decides how long activations live,
and so how much memory the schedule needs (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from piper.schedules.synthesis.priorities import beat
from piper.schedules.synthesis.problem import F, I, Problem

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
    return random.choice(list(neighbours(block, slope, pause)))


def neighbours(block: BuildingBlock, slope: float, pause: float) -> Iterator[BuildingBlock]:
    """Yield the block with each of its numbers replaced in turn."""
    yield replace(block, forward=(slope, block.forward[1]))
    yield replace(block, forward=(block.forward[0], slope))
    yield replace(block, inputs=(slope, block.inputs[1]))
    yield replace(block, inputs=(block.inputs[0], slope))
    yield replace(block, at_turns=pause)
    yield replace(block, at_loss=pause)
    yield replace(block, at_returns=pause)
