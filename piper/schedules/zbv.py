"""ZB-V: stages go down the ranks and come back up, so that backwards start where forwards did."""

from piper.directives.order import Order
from piper.schedules.grid import Grid, Row, RowWriter, Stage, need_whole, orders, registered


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
    """Return the grid of `zbv`."""
    need_whole("zbv", ranks=ranks, microbatches=microbatches)
    row = few if microbatches <= ranks else many
    return Grid(rows=tuple(row(rank, ranks, microbatches) for rank in range(ranks)))


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


def few(rank: int, ranks: int, microbatches: int) -> Row:
    """Return one rank's row for at most as many microbatches as ranks.

    Each microbatch goes through as if it were alone.

    A microbatch enters every second slot and moves one stage a slot: down, up, and back as gradients. It
    meets a rank in four slots, any two of them an odd number or 2 ranks apart; entries are an even number
    below 2 ranks apart, so two microbatches never want a rank at once. Weight gradients take the free slots.
    """
    stages = 2 * ranks
    planned = []
    for stage in (rank, stages - 1 - rank):
        for entry in range(0, 2 * microbatches, 2):
            planned += [(entry + stage, "F", stage), (entry + 2 * stages - 1 - stage, "BI", stage)]
    row = RowWriter(microbatches)
    clock = 0
    for slot, phase, stage in sorted(planned):
        while clock < slot and row.owed:
            row.weights()
            clock += 1
        clock = slot + 1
        if phase == "F":
            row.forward(stage)
        else:
            row.inputs(stage)
    return row.finish()
