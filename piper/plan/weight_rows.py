"""The rows of a bucket's matrices, and the parts of them that lie in a shard: what is gathered in fp8.

A shard is a run of elements, so its first and last row may be parts of rows that other shards hold too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from piper.plan.bucket import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Neighbouring elements of a bucket: some whole rows, or a part of one."""

    start: int
    stop: int
    row: int  # the first one, counted over all matrices of the bucket
    count: int


def runs_of_rows(bucket: Bucket, start: int, stop: int) -> Iterator[RowRun]:
    """Yield the rows between two elements of a flat bucket. What pads its end belongs to no row."""
    before = 0
    for piece in bucket.pieces:
        rows, width = piece.shape
        low, high = max(piece.offset, start), min(piece.offset + piece.numel, stop)
        while low < high:
            row, column = divmod(low - piece.offset, width)
            count = 1 if column else max(1, (high - low) // width)
            end = min(high, low - column + count * width)
            yield RowRun(start=low, stop=end, row=before + row, count=count)
            low = end
        before += rows


def rows_of_shards(bucket: Bucket) -> list[tuple[int, int]]:
    """Return the first row of each shard that is gathered and the one after its last."""
    rows = []
    for rank in range(bucket.group_size // bucket.parts):
        runs = list(runs_of_rows(bucket, *bucket.gathered(rank)))
        rows.append((runs[0].row, runs[-1].row + runs[-1].count) if runs else (0, 0))
    return rows


def gathered_nbytes(bucket: Bucket) -> int:
    """Return the bytes of a whole bucket as it is gathered: in fp8 its elements, and a scale for each row."""
    if not bucket.gathered_as:
        return bucket.nbytes
    rows = rows_of_shards(bucket)
    most = max(last - first for first, last in rows)
    return bucket.padded + len(rows) * most * max(4, bucket.itemsize)
