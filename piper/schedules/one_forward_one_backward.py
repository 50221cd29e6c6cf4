"""1F1B, plain and interleaved: after a warm-up, one backward for each forward, which saves memory."""

from itertools import zip_longest

from piper.directives.order import Order
from piper.schedules.grid import Grid, Row, Stage, need_whole, orders
from piper.schedules.interleaving import loop
from piper.schedules.names import fixed, interleaved
from piper.schedules.row_builder import RowWriter


def one_f_one_b(stages: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run forwards and backwards in turn, with one stage per rank.

    The bubble is gpipe's, (stages - 1)(F + B); stage s holds at most stages - s microbatches.

    rank 0  0F0 0F1 0F2 .   .   .   .   0B0 --  0F3 0B1 --  .   0B2 --  .   0B3 --
    rank 1  .   1F0 1F1 .   .   1B0 --  1F2 1B1 --  1F3 1B2 --  .   1B3 --  .   .
    rank 2  .   .   2F0 2B0 --  2F1 2B1 --  2F2 2B2 --  2F3 2B3 --  .   .   .   .
    """
    return orders(one_f_one_b_grid(stages, microbatches), stage=stage, part=part)


def interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int = 2, *, stage: Stage = "PP", part: str = "MB"
) -> list[Order]:
    """Run forwards and backwards in turn, with interleaved stages: rank r holds r, r + ranks, ...

    The bubble is (ranks - 1)(F + B) of these smaller stages when there are as many microbatches as ranks or
    more. Any number of microbatches works, also one that ranks do not divide.

    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 --  .   2B1 --  .   2B2 --  0B0 --  0B1 --  0B2 --
    rank 1  .   1F0 1F1 1F2 3F0 3B0 --  3F1 3B1 --  3F2 3B2 --  1B0 --  1B1 --  1B2 --  .   .
    """
    grid = interleaved_1f1b_grid(ranks, microbatches, stages_per_rank)
    return orders(grid, stage=stage, part=part)


@fixed("1f1b", 1, stages_per_rank=1, instead="interleaved-1f1b")
def one_f_one_b_grid(stages: int, microbatches: int) -> Grid:
    """Return the grid of `one_f_one_b`."""
    need_whole("one_f_one_b", stages=stages, microbatches=microbatches)
    return Grid(rows=tuple(alternate(rank, stages, microbatches, 1) for rank in range(stages)))


@interleaved("interleaved-1f1b", 2)
def interleaved_1f1b_grid(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Grid:
    """Return the grid of `interleaved_1f1b`."""
    need_whole("interleaved_1f1b", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return Grid(rows=tuple(alternate(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks)))


def alternate(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """Return one rank's row: warm-up forwards, then forward and backward in turn, then the last backwards."""
    path = loop(rank, ranks, microbatches, stages_per_rank)
    # One forward for each rank below lets the first backward come up just in time. Interleaved, stages are
    # smaller and transfers weigh more: a second one keeps the rank busy while a gradient is on its way.
    per_hop = 1 if stages_per_rank == 1 else 2
    warmup = path.lead + per_hop * (ranks - 1 - rank)
    row = RowWriter(microbatches)
    for stage in path.forwards[:warmup]:
        row.forward(stage)
    for backward, forward in zip_longest(path.backwards, path.forwards[warmup:]):
        if forward is not None:
            row.forward(forward)
        row.backward(backward)
    return row.finish()
