"""V-Half and V-Min: the V of ZB-V with microbatches that turn back sooner, so that fewer are alive at once.

From Qi et al., Pipeline Parallelism with Controllable Memory (2024). A building block says at which slot one
microbatch meets each stage; a new microbatch follows every six slots, the work of a rank on one microbatch.
No two of a rank's four slots are equal modulo six, so the blocks of all microbatches interlock, and two slots
of every six are left for weight gradients.
"""

from piper.directives.order import Order
from piper.schedules.grid import Grid, need_whole, orders
from piper.schedules.names import SYNTHESISED, fixed
from piper.schedules.stages import Memory, Placement, StageCosts
from piper.schedules.synthesis.blocks import BuildingBlock, times_of
from piper.schedules.synthesis.list_schedulers import in_sequence
from piper.schedules.synthesis.problem import problem_of
from piper.schedules.synthesis.squeeze import squeezed


def v_half(ranks: int, microbatches: int, *, stage: str = "PP", part: str = "MB") -> list[Order]:
    """Hold about half of 1F1B's activations: a V in which the way down takes two slots a stage, up one.

    A rank holds at most ranks + 2 forwards of its two stages, where 1F1B's first rank holds as much as
    2 ranks of them. Rank r holds stages r and 2 ranks - 1 - r. The bubble is longer than that of `zbv`.

    rank 0  0F0 0F1 0F2 .   .   5F0 5I0 5F1 5I1 5W0 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    rank 1  .   1F0 1F1 1F2 4F0 .   4F1 4I0 4W0 4I1 1I0 4W1 4F2 1W0 1I1 4I2 1W1 4W2 1I2 1W2 .
    rank 2  .   .   2F0 3F0 2F1 3F1 2F2 .   3I0 2I0 3W0 3F2 3I1 2I1 2W0 3W1 3I2 2I2 2W1 3W2 2W2
    """
    return orders(v_half_grid(ranks, microbatches), stage=stage, part=part)


def v_min(ranks: int, microbatches: int, *, stage: str = "PP", part: str = "MB") -> list[Order]:
    """Hold about a third of 1F1B's activations: a V in which every microbatch moves on without a pause.

    A rank holds at most 2(ranks + 4) / 3 forwards of its two stages, where 1F1B's first rank holds as much as
    2 ranks of them. Rank r holds stages r and 2 ranks - 1 - r. The bubble is longer than that of `v_half`.

    rank 0  0F0 0F1 .   .   .   5F0 5I0 5F1 5W0 0F2 5I1 0I0 5W1 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    rank 1  .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 1F2 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
    rank 2  .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
    """
    return orders(v_min_grid(ranks, microbatches), stage=stage, part=part)


@fixed("v-half", 6, stages_per_rank=2, instead=SYNTHESISED)
def v_half_grid(ranks: int, microbatches: int) -> Grid:
    """Return the grid of `v_half`."""
    need_whole("v_half", ranks=ranks, microbatches=microbatches)
    # Where ranks are even, the two ways down would meet in one slot: a pause at the loss keeps them apart.
    pause = 0 if ranks % 2 else 3
    block = BuildingBlock(forward=(2, 1), inputs=(2, 1), at_loss=pause, at_returns=1)
    return repeated(block, ranks, microbatches, ranks + 2)


@fixed("v-min", 7, stages_per_rank=2, instead=SYNTHESISED)
def v_min_grid(ranks: int, microbatches: int) -> Grid:
    """Return the grid of `v_min`."""
    need_whole("v_min", ranks=ranks, microbatches=microbatches)
    # Where ranks are a multiple of three, the ways down of F and BI would meet in one slot.
    pause = 0 if ranks % 3 else 2
    limit = (2 * ranks + {0: 6, 1: 4, 2: 8}[ranks % 3]) // 3
    return repeated(BuildingBlock(at_loss=pause), ranks, microbatches, limit)


def repeated(block: BuildingBlock, ranks: int, microbatches: int, limit: int) -> Grid:
    """Return the grid in which each microbatch follows a block and a rank holds at most `limit` forwards."""
    stages = 2 * ranks
    memory = Memory(saved=[1] * stages, carried=[1] * stages, limit=limit)
    problem = problem_of(StageCosts.even(stages), Placement.v(ranks), microbatches, memory)
    schedule = in_sequence(problem, squeezed(problem, times_of(problem, block), limit))
    assert schedule is not None, "a building block that does not fit its own limit"
    return Grid(rows=tuple(tuple((problem.action(operation),) for operation in row) for row in schedule.rows))
