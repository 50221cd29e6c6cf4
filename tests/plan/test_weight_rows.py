"""The rows of a bucket's matrices in its shards, and the bytes of a gather in fp8."""

from dataclasses import replace

from piper.plan.bucket import Bucket, gathered_nbytes, rows_of_shards, runs_of_rows
from piper.plan.updates import Piece

TWO = Bucket(
    name="PP=0/0",
    pieces=(Piece(name="a", shape=(3, 4), offset=0), Piece(name="b", shape=(2, 5), offset=12)),
    devices=(0, 1, 2, 3),
    groups=((0, 1, 2, 3),),
    chunks=("PP=0",),
    dtype="bfloat16",
    itemsize=2,
    zero=3,
    gathered_as="fp8",
)


def runs(start: int, stop: int) -> list[tuple[int, int, int, int]]:
    return [(run.start, run.stop, run.row, run.count) for run in runs_of_rows(TWO, start, stop)]


def test_rows_of_a_shard_are_whole_or_parts() -> None:
    assert runs(0, 22) == [(0, 12, 0, 3), (12, 22, 3, 2)]
    assert runs(2, 11) == [(2, 4, 0, 1), (4, 8, 1, 1), (8, 11, 2, 1)]
    assert runs(5, 7) == [(5, 7, 1, 1)]
    assert runs(10, 18) == [(10, 12, 2, 1), (12, 17, 3, 1), (17, 18, 4, 1)]
    assert runs(20, 24) == [(20, 22, 4, 1)]  # the last two only pad


def test_shards_that_cut_a_row_share_it() -> None:
    assert TWO.padded == 24
    assert rows_of_shards(TWO) == [(0, 2), (1, 3), (3, 5), (4, 5)]


def test_a_gather_counts_elements_of_one_byte_and_scales() -> None:
    assert gathered_nbytes(TWO) == 24 + 4 * 2 * 4
    assert gathered_nbytes(replace(TWO, dtype="float64", itemsize=8)) == 24 + 4 * 2 * 8
    assert gathered_nbytes(replace(TWO, gathered_as="")) == 48


def test_an_empty_shard_has_no_rows() -> None:
    assert rows_of_shards(replace(TWO, bounds=(0, 12, 12, 22, 22))) == [(0, 3), (0, 0), (3, 5), (0, 0)]
