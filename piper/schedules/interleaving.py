"""The path of microbatches when rank r holds stages r, r + ranks, ...: in rounds, loop after loop."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The order in which a rank's stages take microbatches forward, and backward."""

    forwards: tuple[int, ...]  # stages; a stage takes its microbatches in turn
    backwards: tuple[int, ...]
    lead: int  # forwards the last rank runs before its first backward can follow one of them


def loop(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Loop:
    """Send each round of microbatches through all of a rank's stages before the next round.

    2 ranks, rounds of 2, rank 0: forwards 0 0 2 2 0 0 2 2, backwards 2 2 0 0 2 2 0 0
    """
    mine = range(rank, ranks * stages_per_rank, ranks)
    rounds = list(round_sizes(ranks, microbatches))
    return Loop(
        forwards=tuple(stage for size in rounds for stage in mine for _ in range(size)),
        backwards=tuple(stage for size in rounds for stage in reversed(mine) for _ in range(size)),
        lead=(stages_per_rank - 1) * rounds[0],
    )


def round_sizes(ranks: int, microbatches: int) -> Iterator[int]:
    """Yield the sizes of the rounds of microbatches: enough to keep every rank busy, even, larger ones first.

    A round shorter than the ranks waits for its own first microbatch to come round, and one longer than the
    first can deadlock, as the lead is sized for the first.
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    yield from (size + 1 for _ in range(longer))
    yield from (size for _ in range(count - longer))
