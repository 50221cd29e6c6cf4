"""GPipe: fill the pipeline with every forward, then drain it with every backward."""

from piper.directives.order import Order
from piper.schedules.grid import Grid, RowWriter, Stage, need_whole, orders, registered


def gpipe(stages: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run all forwards, then all backwards, with one stage per rank.

    The bubble is (stages - 1)(F + B), and every microbatch's activations are alive at once.

    rank 0  0F0 0F1 0F2 .   .   .   0B0 --  0B1 --  0B2 --
    rank 1  .   1F0 1F1 1F2 1B0 --  1B1 --  1B2 --  .   .
    """
    return orders(gpipe_grid(stages, microbatches), stage=stage, part=part)


@registered("gpipe", 0, stages_per_rank=1, instead="interleaved-1f1b")
def gpipe_grid(stages: int, microbatches: int) -> Grid:
    need_whole("gpipe", stages=stages, microbatches=microbatches)
    rows = []
    for stage in range(stages):
        row = RowWriter(microbatches)
        for _ in range(microbatches):
            row.forward(stage)
        for _ in range(microbatches):
            row.backward(stage)
        rows.append(row.finish())
    return Grid(rows=tuple(rows))
