"""Schedules whose stages go down the ranks and come back up, so that backwards start where forwards did.

In V-Half and V-Min microbatches turn back sooner than in ZB-V, so that fewer are alive at once.
From Qi et al., Pipeline Parallelism with Controllable Memory (2024). A building block says at which slot one
microbatch meets each stage; a new microbatch follows every six slots, the work of a rank on one microbatch.
No two of a rank's four slots are equal modulo six, so the blocks of all microbatches interlock, and two slots
of every six are left for weight gradients. Fewer blocks interlock at the two ends of a step: the gaps there
are closed slot by slot (`squeezed`). All stages are alike, F = BI = BW = 1, so a slot is one unit of time.
"""

from bisect import bisect_left
from collections.abc import Sequence

from piper.directives.order import Order
from piper.schedules.grid import (
    SYNTHESISED,
    Grid,
    Row,
    RowWriter,
    Stage,
    need_whole,
    orders,
    registered,
)
from piper.schedules.synthesis.list_schedulers import F, I, Problem, W, in_sequence, problem_of
from piper.schedules.timing import Memory, Placement, StageCosts

FREE = -1  # a slot in which neither an F nor a BI runs
PERIOD = 6  # slots until the next microbatch
Block = dict[int, list[int]]  # of F and I: the slot of each stage


def zbv(ranks: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run split backwards over two stages per rank in a V: rank r holds stages r and 2 ranks - 1 - r.

    From 2 ranks - 1 microbatches on, with F = I = W, no rank waits once it has started: the bubble is the way
    down the V, (ranks - 1)F. A rank holds at most 2 ranks forwards of its two stages: 1F1B's peak on all.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    return orders(zbv_grid(ranks, microbatches), stage=stage, part=part)


@registered("zbv", 5, stages_per_rank=2, instead="interleaved-zero-bubble")
def zbv_grid(ranks: int, microbatches: int) -> Grid:
    need_whole("zbv", ranks=ranks, microbatches=microbatches)
    if microbatches <= ranks:
        # Each goes through as if it were alone, down, up and back as gradients, one stage a slot. It meets a
        # rank in four slots, any two of them an odd number or 2 ranks apart; entries are an even number below
        # 2 ranks apart, so two microbatches never want a rank at once. Weight gradients take the free slots.
        problem = v_problem(ranks, microbatches)
        return grid_of_slots(problem, block_slots(problem, building_block(ranks, 1, 0, 0), period=2))
    return Grid(rows=tuple(many(rank, ranks, microbatches) for rank in range(ranks)))


def many(rank: int, ranks: int, microbatches: int) -> Row:
    """Return one rank's row when there are enough microbatches to fill the pipeline: the published order."""
    down, up = rank, 2 * ranks - 1 - rank
    total = max(microbatches, 2 * ranks - 1)  # enough for the whole V; the writer drops moves past the last
    row = RowWriter(microbatches)
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        row.inputs(up)
        row.weights()
    for _ in range(total - ranks):
        row.forward(down)
        row.inputs(down)
        row.weights()
        row.forward(up)
        row.inputs(up)
        row.weights()
    for _ in range(rank):
        row.inputs(down)
        row.inputs(up)
    for _ in range(ranks - rank):
        row.inputs(down)
        row.weights()
    return row.finish()


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


@registered("v-half", 6, stages_per_rank=2, instead=SYNTHESISED)
def v_half_grid(ranks: int, microbatches: int) -> Grid:
    need_whole("v_half", ranks=ranks, microbatches=microbatches)
    # Where ranks are even, the two ways down would meet in one slot: a pause at the loss keeps them apart.
    pause = 0 if ranks % 2 else 3
    return repeated(building_block(ranks, 2, pause, 1), ranks, microbatches, ranks + 2)


@registered("v-min", 7, stages_per_rank=2, instead=SYNTHESISED)
def v_min_grid(ranks: int, microbatches: int) -> Grid:
    need_whole("v_min", ranks=ranks, microbatches=microbatches)
    # Where ranks are a multiple of three, the ways down of F and BI would meet in one slot.
    pause = 0 if ranks % 3 else 2
    limit = (2 * ranks + {0: 6, 1: 4, 2: 8}[ranks % 3]) // 3
    return repeated(building_block(ranks, 1, pause, 0), ranks, microbatches, limit)


def building_block(ranks: int, slope: int, at_loss: int, at_returns: int) -> Block:
    """Return the slots in which one microbatch meets each stage.

    slope: slots from a stage to the next on the way down the ranks; on the way up it is one. at_loss,
    at_returns: pauses between the last stage's F and its BI, and where gradients turn.
    """
    forward = [slope * step for step in range(ranks)]
    forward += [forward[-1] + 1 + step for step in range(ranks)]
    inputs = [forward[-1] + 1 + at_loss + slope * step for step in range(ranks)]
    inputs += [inputs[-1] + 1 + at_returns + step for step in range(ranks)]
    return {F: forward, I: inputs[::-1]}


def v_problem(ranks: int, microbatches: int, limit: int | None = None) -> Problem:
    """Return the operations of a V of equal stages. limit: the forwards that a rank may hold. None: any."""
    stages = 2 * ranks
    memory = None if limit is None else Memory(saved=[1] * stages, carried=[1] * stages, limit=limit)
    return problem_of(StageCosts.even(stages), Placement.v(ranks), microbatches, memory)


def block_slots(problem: Problem, block: Block, period: int) -> list[int]:
    """Return the slot of each F and BI where a microbatch follows the one before it after a period."""
    operations = zip(problem.kind, problem.stage, problem.microbatch, strict=True)
    return [block[k][stage] + period * number if k in block else 0 for k, stage, number in operations]


def grid_of_slots(problem: Problem, slots: Sequence[int]) -> Grid:
    """Return the grid in which each rank runs F and BI in the order of their slots, and BW in between."""
    schedule = in_sequence(problem, slots)
    assert schedule is not None, "a building block that does not fit its own limit"
    return Grid(rows=tuple(tuple((problem.actions[each],) for each in row) for row in schedule.rows))


def repeated(block: Block, ranks: int, microbatches: int, limit: int) -> Grid:
    """Return the grid in which each microbatch follows a block and a rank holds at most `limit` forwards."""
    problem = v_problem(ranks, microbatches, limit)
    return grid_of_slots(problem, squeezed(problem, block_slots(problem, block, PERIOD), limit))


class SlotRow:
    """One rank's slots: which F or BI runs in each, and, in free slots, weight gradients that are owed."""

    def __init__(self, problem: Problem, slots: Sequence[int]) -> None:
        self.problem = problem
        self.slots = list(slots)
        self.owed = [0] * len(slots)  # weight gradients that could run, after each slot
        self.held = [0] * len(slots)  # forwards whose weight gradients have not run, after each slot
        self.update(0, len(slots))

    def update(self, first: int, last: int) -> int:
        """Update what is owed and held from one slot on, and return the peak of what changed.

        Slots after `last` are as they were: from the first of them with the same state on nothing changes.
        """
        owed, held = (self.owed[first - 1], self.held[first - 1]) if first else (0, 0)
        peak = 0
        for slot in range(first, len(self.slots)):
            operation = self.slots[slot]
            if operation == FREE:
                if owed:
                    owed, held = owed - 1, held - 1
            elif self.problem.kind[operation] == F:
                held += 1
            else:
                owed += 1
            if slot > last and (self.owed[slot], self.held[slot]) == (owed, held):
                break
            self.owed[slot], self.held[slot] = owed, held
            peak = max(peak, held)
        return peak

    def swap(self, slot: int, other: int) -> int:
        """Exchange what runs in two slots, and return the peak of what changed."""
        self.slots[slot], self.slots[other] = self.slots[other], self.slots[slot]
        return self.update(min(slot, other), max(slot, other))


def squeezed(problem: Problem, slot_of: list[int], limit: int) -> list[int]:
    """Move each F and BI of the warm-up and the cool-down to the first free slot that the memory allows.

    slot_of: no two F or BI of a rank share a slot. limit: the forwards that a rank may hold.
    """
    moved = [operation for operation in range(problem.size) if problem.kind[operation] != W]
    moved.sort(key=lambda operation: (slot_of[operation], operation))
    length = max(slot_of) + 1 + len(moved)  # with room at the end for all weight gradients
    slots = [[FREE] * length for _ in range(problem.ranks)]
    for operation in moved:
        assert slots[problem.rank[operation]][slot_of[operation]] == FREE, "two operations in one slot"
        slots[problem.rank[operation]][slot_of[operation]] = operation
    rows = [SlotRow(problem, row) for row in slots]
    steady_from = slot_of[problem.number(I, 0, 0)]
    steady_to = slot_of[problem.number(F, 0, problem.microbatches - 1)]
    for operation in moved:
        now = slot_of[operation]
        if steady_from <= now <= steady_to:
            continue
        row = rows[problem.rank[operation]]
        first = earliest(problem, slot_of, operation)
        choices = [slot for slot in range(first, now) if row.slots[slot] == FREE]
        slot_of[operation] = first_that_fits(row, now, choices, limit)
    return slot_of


def earliest(problem: Problem, slot_of: Sequence[int], operation: int) -> int:
    """Return the first slot after what an operation needs, and after its stage's previous microbatch."""
    needed = [other for other, _ in problem.before[operation]]
    if problem.microbatch[operation]:
        needed.append(operation - 3)
    return max((slot_of[other] + 1 for other in needed), default=0)


def first_that_fits(row: SlotRow, now: int, choices: Sequence[int], limit: int) -> int:
    """Move an operation to the earliest of the free slots at which the rank stays within its limit.

    An earlier F holds memory longer, so whatever does not fit in one slot fits in none before it.
    """

    def fits(slot: int) -> bool:
        peak = row.swap(now, slot)
        row.swap(slot, now)
        return peak <= limit

    chosen = [*choices, now][bisect_left(choices, True, key=fits)]
    row.swap(now, chosen)
    return chosen
