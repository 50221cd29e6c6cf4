"""Zero bubble (ZB-H1), plain and interleaved: backwards in two halves, the weight half filling the gaps."""

from itertools import zip_longest

from piper.directives.order import Order
from piper.schedules.grid import Grid, Row, Stage, need_whole, orders
from piper.schedules.interleaving import loop
from piper.schedules.names import fixed, interleaved
from piper.schedules.row_builder import RowWriter


def zero_bubble(stages: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run forwards and input gradients in turn as 1F1B does, and weight gradients where a rank would wait.

    The bubble is (stages - 1)(F + B - 2W). Stage s has at most stages - s forwards whose gradient has not
    come, as in 1F1B, and owes up to s weight gradients: no rank holds more than 1F1B's first.

    rank 0  0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    return orders(zero_bubble_grid(stages, microbatches), stage=stage, part=part)


def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int = 2, *, stage: Stage = "PP", part: str = "MB"
) -> list[Order]:
    """Run `zero_bubble` with stages dealt round the ranks: rank r holds r, r + ranks, ...

    The bubble is (ranks - 1)(F + B - 2W) of these smaller stages when there are as many microbatches as ranks
    or more. Any number of microbatches works, also one that ranks do not divide.

    rank 0  0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1  .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
    """
    grid = interleaved_zero_bubble_grid(ranks, microbatches, stages_per_rank)
    return orders(grid, stage=stage, part=part)


@fixed("zero-bubble", 3, stages_per_rank=1, instead="interleaved-zero-bubble")
def zero_bubble_grid(stages: int, microbatches: int) -> Grid:
    """Return the grid of `zero_bubble`."""
    need_whole("zero_bubble", stages=stages, microbatches=microbatches)
    return Grid(rows=tuple(alternate_split(rank, stages, microbatches, 1) for rank in range(stages)))


@interleaved("interleaved-zero-bubble", 4)
def interleaved_zero_bubble_grid(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Grid:
    """Return the grid of `interleaved_zero_bubble`."""
    need_whole(
        "interleaved_zero_bubble", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    rows = (alternate_split(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks))
    return Grid(rows=tuple(rows))


def alternate_split(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """Return one rank's row: warm-up forwards, then F, BI and the BW of an older microbatch in turn."""
    path = loop(rank, ranks, microbatches, stages_per_rank)
    warmup = path.lead + ranks - 1 - rank
    row = RowWriter(microbatches)
    for stage in path.forwards[:warmup]:
        row.forward(stage)
    for turn, (backward, forward) in enumerate(zip_longest(path.backwards, path.forwards[warmup:])):
        if forward is not None:
            row.forward(forward)
        row.inputs(backward)
        # Rank r owes r weight gradients: its input gradients go up that much sooner, and what it owes fills
        # its wait at the end, when the ranks above are still at work.
        if turn >= rank:
            row.weights()
    return row.finish()
