"""DualPipe-V: a V of stages in which a forward of one direction overlaps a backward of the other."""

from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.schedules.grid import Grid, Row, Stage, need_whole, orders
from piper.schedules.names import fixed
from piper.schedules.row_builder import RowWriter


def dualpipe_v(ranks: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Overlap a forward and a backward on each rank, in a V: rank r holds stages r and 2 ranks - 1 - r.

    In the middle of the step every group is a forward of one stage and a whole backward of the other, so the
    communication of each hides behind the computation of the other. The bubble is (ranks - 1)(F&B + B - 3W),
    where F&B is an overlapped pair. A rank holds at most 2 ranks + 1 forwards of its two stages.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 --  .   3F2+0B0 --  3B2 --  .   3F3+0B1 --  3B3 --  0I2 0W2 0I3 0W3
    rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 --  2F2+1B0 --  1F3+2B1 --  2F3+1B1 --  2B2 --  1B2 --  .   2I3 1I3 2W3 1W3
    """  # noqa: E501  the smallest grid that shows every part of it
    return orders(dualpipe_v_grid(ranks, microbatches), stage=stage, part=part)


@fixed("dualpipe-v", 8, stages_per_rank=2, instead="interleaved-zero-bubble")
def dualpipe_v_grid(ranks: int, microbatches: int) -> Grid:
    """Return the grid of `dualpipe_v`."""
    need_whole("dualpipe_v", ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"microbatches={microbatches} cannot fill both directions of ranks={ranks}",
            by="dualpipe_v",
            facts={"needs": f"at least {2 * ranks} microbatches, one for each of the {2 * ranks} stages"},
            hint=f"split into {2 * ranks} parts or more, or use zbv, which takes any number",
        )
    return Grid(rows=tuple(row_of(rank, ranks, microbatches) for rank in range(ranks)))


def row_of(rank: int, ranks: int, microbatches: int) -> Row:
    """Return one rank's row: fill the V, overlap while both directions are full, drain it."""
    row = RowWriter(microbatches)
    fill(row, rank, ranks)
    overlap(row, rank, ranks, microbatches)
    drain(row, rank, ranks)
    return row.finish()


def fill(row: RowWriter, rank: int, ranks: int) -> None:
    """Run forwards until the first gradients come back, and split backwards until the V is full."""
    down, up, below = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    for _ in range(2 * below):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(below):
        row.inputs(up)
        row.weights()
        row.forward(up)


def overlap(row: RowWriter, rank: int, ranks: int, microbatches: int) -> None:
    """Pair each forward with a backward of the rank's other stage, as long as there are new microbatches."""
    down, up, below = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and below == 0:
            # A pair starts when both members can. On the last rank the first forward can sooner, and the rank
            # above waits for it: apart, they shorten the whole step.
            row.forward(down)
            row.backward(up)
        else:
            row.overlap(down, up)
        row.overlap(up, down)
    for _ in range(below):
        row.backward(up)
        row.overlap(up, down)


def drain(row: RowWriter, rank: int, ranks: int) -> None:
    """Run the last backwards, half of them split, so that weight gradients fill the waits at the end."""
    down, up, below = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        if turn <= rank:
            row.backward(stage)
        else:
            row.inputs(stage)
    for _ in range(below):
        row.weights()
        row.inputs(down)
