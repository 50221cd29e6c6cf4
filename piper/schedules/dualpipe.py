"""DualPipe and DualPipe-V: a forward of one direction overlaps a backward of the other on each rank."""

from dataclasses import replace

from piper.directives.order import Order
from piper.errors import ScheduleError
from piper.schedules.grid import Action, Grid, Row, RowWriter, Stage, need_whole, orders, registered


def dualpipe_v(ranks: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Overlap a forward and a backward on each rank, in a V: rank r holds stages r and 2 ranks - 1 - r.

    In the middle of the step every group is a forward of one stage and a whole backward of the other, so the
    communication of each hides behind the computation of the other. The bubble is (ranks - 1)(F&B + B - 3W),
    where F&B is an overlapped pair. A rank holds at most 2 ranks + 1 forwards of its two stages.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 --  .   3F2+0B0 --  3B2 --  .   3F3+0B1 --  3B3 --  0I2 0W2 0I3 0W3
    rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 --  2F2+1B0 --  1F3+2B1 --  2F3+1B1 --  2B2 --  1B2 --  .   2I3 1I3 2W3 1W3
    """  # noqa: E501  the smallest grid that shows every part of it
    return orders(dualpipe_v_grid(ranks, microbatches), stage=stage, part=part)


@registered("dualpipe-v", 8, stages_per_rank=2, instead="interleaved-zero-bubble")
def dualpipe_v_grid(ranks: int, microbatches: int) -> Grid:
    need_whole("dualpipe_v", ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"microbatches={microbatches} cannot fill both directions of ranks={ranks}",
            by="dualpipe_v",
            facts={"needs": f"at least {2 * ranks} microbatches, one for each of the {2 * ranks} stages"},
            hint=f"split into {2 * ranks} parts or more, or use zbv, which takes any number",
        )
    return Grid(rows=tuple(row_of(rank, ranks, microbatches) for rank in range(ranks)))


def dualpipe(ranks: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Send half of the microbatches down the ranks and half up, as DeepSeek-V3 does.

    There are as many stages as ranks. Microbatches below `microbatches / 2` run stage s on rank s, the others
    on rank `ranks - 1 - s`; so rank r holds stages r and `ranks - 1 - r`, and each stage lives on two ranks.
    In the middle of the step every group is a forward of one direction and a whole backward of the other. The
    bubble is (ranks / 2 - 1)(F&B + B - 3W). A rank holds at most ranks + 1 forwards of its two stages.

    rank 0  0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3+3B5 --  .   3F6+0B0 --  3B6 --  .   3F7+0B1 --  3B7 --  0I2 0W2 0I3 0W3
    rank 1  .   1F0 2F4 1F1 2F5 1F2 2B4 --  2F6+1B0 --  1F3+2B5 --  2F7+1B1 --  2B6 --  1B2 --  .   2I7 1I3 2W7 1W3
    rank 2  .   1F4 2F0 1F5 2F1 1F6 2B0 --  2F2+1B4 --  1F7+2B1 --  2F3+1B5 --  2B2 --  1B6 --  .   2I3 1I7 2W3 1W7
    rank 3  0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7+3B1 --  .   3F2+0B4 --  3B2 --  .   3F3+0B5 --  3B3 --  0I6 0W6 0I7 0W7
    """  # noqa: E501  the smallest grid that shows every part of it
    return orders(dualpipe_grid(ranks, microbatches), stage=stage, part=part)


@registered("dualpipe", 9, stages_per_rank=1, instead="dualpipe-v")
def dualpipe_grid(ranks: int, microbatches: int) -> Grid:
    """Return the grid of `dualpipe`: a DualPipe-V over half of the ranks, and its mirror image over the rest.

    Microbatches of the down half of the V and of its up half are of different directions.
    """
    need_whole("dualpipe", ranks=ranks, microbatches=microbatches)
    if ranks % 2:
        raise ScheduleError(
            f"ranks={ranks} is odd",
            by="dualpipe",
            facts={"needs": "an even number: the two directions meet between the two ranks in the middle"},
            hint="use one rank more or less, or dualpipe_v, which takes any number",
        )
    if microbatches < 2 * ranks or microbatches % 2:
        raise ScheduleError(
            f"microbatches={microbatches} cannot fill both directions of ranks={ranks}",
            by="dualpipe",
            facts={
                "needs": f"an even number of microbatches, at least {2 * ranks}: {ranks} in each direction"
            },
            hint=f"split into {max(2 * ranks, microbatches + 1)} parts, or use zbv, which takes any number",
        )
    half = microbatches // 2

    def directed(action: Action, up: bool) -> Action:
        """Return an action: of the stages of one half of the V on the second half of the microbatches."""
        shift = half if (action.stage >= ranks // 2) == up else 0
        return replace(action, microbatch=action.microbatch + shift)

    rows = [row_of(rank, ranks // 2, half) for rank in range(ranks // 2)]
    forth, back = (
        [tuple(tuple(directed(action, up) for action in group) for group in row) for row in rows]
        for up in (True, False)
    )
    return Grid(rows=(*forth, *reversed(back)))


def row_of(rank: int, ranks: int, microbatches: int) -> Row:
    """Return one rank's row: fill the V, overlap while both directions are full, drain it."""
    down, up, below = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    row = RowWriter(microbatches)
    # Fill: run forwards until the first gradients come back, and split backwards until the V is full.
    for _ in range(2 * below):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(below):
        row.inputs(up)
        row.weights()
        row.forward(up)
    # Overlap: pair each forward with a backward of the other stage, as long as there are new microbatches.
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
    # Drain: split half of the last backwards, so that weight gradients fill the waits at the end.
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        if turn <= rank:
            row.backward(stage)
        else:
            row.inputs(stage)
    for _ in range(below):
        row.weights()
        row.inputs(down)
    return row.finish()
