"""The rows of a batch that a device is sent: those it loads, under the numbers they have in the whole."""

import pytest
import torch

from piper.runtime.compute import merged_spans
from piper.workers.messages import BatchSlice


def test_ranges_are_joined_only_where_they_touch() -> None:
    assert merged_spans([(4, 6), (0, 2), (2, 3), (8, 9), (5, 7)]) == [(0, 3), (4, 7), (8, 9)]


def test_rows_are_found_by_their_numbers_in_the_whole() -> None:
    whole = torch.arange(10)
    excerpt = BatchSlice(samples=10, dtype=whole.dtype, parts=((2, whole[2:5]), (7, whole[7:9])))
    assert len(excerpt) == 10
    assert excerpt[3:5].tolist() == [3, 4]
    assert excerpt[7:8].tolist() == [7]
    for rows in (slice(0, 1), slice(4, 6), slice(8, 10)):
        with pytest.raises(IndexError):
            excerpt[rows]
