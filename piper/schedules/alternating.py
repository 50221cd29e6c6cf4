"""1F1B and zero bubble (ZB-H1), plain and interleaved: after a warm-up, one backward for each forward.

Zero bubble runs backwards in two halves, the weight half filling the gaps.
"""

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest

from piper.directives.order import Order
from piper.schedules.grid import Grid, Row, RowWriter, Stage, need_whole, orders, registered


def one_f_one_b(stages: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run forwards and backwards in turn, with one stage per rank.

    The bubble is gpipe's, (stages - 1)(F + B); stage s holds at most stages - s microbatches.

    rank 0  0F0 0F1 0F2 .   .   .   .   0B0 --  0F3 0B1 --  .   0B2 --  .   0B3 --
    rank 1  .   1F0 1F1 .   .   1B0 --  1F2 1B1 --  1F3 1B2 --  .   1B3 --  .   .
    rank 2  .   .   2F0 2B0 --  2F1 2B1 --  2F2 2B2 --  2F3 2B3 --  .   .   .   .
    """
    need_whole("one_f_one_b", stages=stages, microbatches=microbatches)
    return orders(alternate(stages, microbatches, split=False), stage=stage, part=part)


def interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int = 2, *, stage: Stage = "PP", part: str = "MB"
) -> list[Order]:
    """Run forwards and backwards in turn, with interleaved stages: rank r holds r, r + ranks, ...

    The bubble is (ranks - 1)(F + B) of these smaller stages when there are as many microbatches as ranks or
    more. Any number of microbatches works, also one that ranks do not divide.

    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 --  .   2B1 --  .   2B2 --  0B0 --  0B1 --  0B2 --
    rank 1  .   1F0 1F1 1F2 3F0 3B0 --  3F1 3B1 --  3F2 3B2 --  1B0 --  1B1 --  1B2 --  .   .
    """
    need_whole("interleaved_1f1b", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return orders(alternate(ranks, microbatches, stages_per_rank, split=False), stage=stage, part=part)


def zero_bubble(stages: int, microbatches: int, *, stage: Stage = "PP", part: str = "MB") -> list[Order]:
    """Run forwards and input gradients in turn as 1F1B does, and weight gradients where a rank would wait.

    The bubble is (stages - 1)(F + B - 2W). Stage s has at most stages - s forwards whose gradient has not
    come, as in 1F1B, and owes up to s weight gradients: no rank holds more than 1F1B's first.

    rank 0  0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    need_whole("zero_bubble", stages=stages, microbatches=microbatches)
    return orders(alternate(stages, microbatches, split=True), stage=stage, part=part)


def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int = 2, *, stage: Stage = "PP", part: str = "MB"
) -> list[Order]:
    """Run `zero_bubble` with stages dealt round the ranks: rank r holds r, r + ranks, ...

    The bubble is (ranks - 1)(F + B - 2W) of these smaller stages when there are as many microbatches as ranks
    or more. Any number of microbatches works, also one that ranks do not divide.

    rank 0  0F0 0F1 0F2 2F0 2F1 .   2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1  .   1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2
    """
    need_whole(
        "interleaved_zero_bubble", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    return orders(alternate(ranks, microbatches, stages_per_rank, split=True), stage=stage, part=part)


def alternate(ranks: int, microbatches: int, stages_per_rank: int = 1, *, split: bool) -> Grid:
    """Return the grid in which each rank warms up with forwards, then runs them and backwards in turn.

    split: backwards are BI, and the BW of an older microbatch.
    """
    rows = (alternating_row(rank, ranks, microbatches, stages_per_rank, split) for rank in range(ranks))
    return Grid(rows=tuple(rows))


registered("1f1b", 1, stages_per_rank=1, instead="interleaved-1f1b")(partial(alternate, split=False))
registered("interleaved-1f1b", 2)(partial(alternate, split=False))
registered("zero-bubble", 3, stages_per_rank=1, instead="interleaved-zero-bubble")(
    partial(alternate, split=True)
)
registered("interleaved-zero-bubble", 4)(partial(alternate, split=True))


def alternating_row(rank: int, ranks: int, microbatches: int, stages_per_rank: int, split: bool) -> Row:
    """Return one rank's row. Each round of microbatches goes through all its stages before the next round.

    2 ranks, rounds of 2, rank 0: forwards 0 0 2 2 0 0 2 2, backwards 2 2 0 0 2 2 0 0
    """
    stages = range(rank, ranks * stages_per_rank, ranks)
    rounds = list(round_sizes(ranks, microbatches))
    forwards = [stage for size in rounds for stage in stages for _ in range(size)]
    backwards = [stage for size in rounds for stage in reversed(stages) for _ in range(size)]
    # The last rank runs the forwards of its other stages before its first backward can follow one of them.
    lead = (stages_per_rank - 1) * rounds[0]
    # One forward for each rank below lets the first backward come up just in time. Interleaved, stages are
    # smaller and transfers weigh more: a second one keeps the rank busy while a gradient is on its way.
    per_hop = 1 if split or stages_per_rank == 1 else 2
    warmup = lead + per_hop * (ranks - 1 - rank)
    row = RowWriter(microbatches)
    for stage in forwards[:warmup]:
        row.forward(stage)
    for turn, (backward, forward) in enumerate(zip_longest(backwards, forwards[warmup:])):
        if forward is not None:
            row.forward(forward)
        if not split:
            row.backward(backward)
            continue
        row.inputs(backward)
        # Rank r owes r weight gradients: its input gradients go up that much sooner, and what it owes fills
        # its wait at the end, when the ranks above are still at work.
        if turn >= rank:
            row.weights()
    return row.finish()


def round_sizes(ranks: int, microbatches: int) -> Iterator[int]:
    """Yield the sizes of the rounds of microbatches: enough to keep every rank busy, even, larger ones first.

    A round shorter than the ranks waits for its own first microbatch to come round, and one longer than the
    first can deadlock, as the lead is sized for the first.
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    yield from (size + 1 for _ in range(longer))
    yield from (size for _ in range(count - longer))
