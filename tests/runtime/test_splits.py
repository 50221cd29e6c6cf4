"""Rows to experts and back: when the host learns their number, and what is copied on the way."""

from typing import cast

import torch

from piper.runtime.comm.base import joined
from piper.runtime.comm.synthetic import AloneGroup
from piper.runtime.expert_exchange import Splits, count

COUNTS = torch.tensor([2, 0, 1, 3])  # two members with two experts each


class Clock:
    """An arrival that counts who waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_the_host_waits_once_and_only_when_it_asks() -> None:
    clock, given, taken = Clock(), torch.tensor([[2, 0], [1, 3]]), torch.tensor([[5, 1], [0, 4]])
    splits = Splits(counts=torch.stack((given, taken)), arrival=cast(torch.Event, clock))
    assert clock.waits == 0
    assert splits.lengths() == ([[2, 0], [1, 3]], [[5, 1], [0, 4]])
    assert splits.lengths() is splits.lengths()
    assert clock.waits == 1


def test_counting_does_not_ask() -> None:
    splits, local = count(AloneGroup("experts", 0, 2), COUNTS)
    assert splits.known is None
    assert local.tolist() == [3, 3]
    assert splits.lengths() == ([[2, 0], [1, 3]], [[2, 0], [1, 3]])


def test_rows_come_back_as_they_left() -> None:
    group = AloneGroup("experts", 0, 2)
    splits, _ = count(group, COUNTS)
    rows = torch.arange(12.0).view(6, 2)
    there = splits.outward(group, rows)
    assert there[:, 0].tolist() == [0, 2, 4, 6, 8, 10]  # by expert: two and one rows, none and three
    assert there.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
    returned = splits.back(group, there)
    assert torch.equal(returned, rows)
    assert returned.untyped_storage().data_ptr() != there.untyped_storage().data_ptr()


def test_parts_of_one_buffer_are_that_buffer() -> None:
    buffer = torch.arange(12.0).view(6, 2)
    for lengths in ([2, 4], [0, 6], [6, 0], [1, 0, 5]):
        together = joined(buffer.split(lengths), whole=True)
        assert together.data_ptr() == buffer.data_ptr()
        assert torch.equal(together, buffer)
        assert together.stride() == buffer.stride()


def test_other_parts_are_copied() -> None:
    buffer, other = torch.arange(12.0).view(6, 2), torch.zeros(3, 2)
    cases = [
        (buffer[:2], other),
        (buffer[2:], buffer[:2]),  # in another order
        (buffer[:2], buffer[4:]),  # with a hole
        (buffer[:2], buffer[2:4]),  # not all of it: the rest would stay in memory
        (buffer[2:4], buffer[4:]),
        (buffer.t()[:1], buffer.t()[1:]),
    ]
    for parts in cases:
        together = joined(parts, whole=True)
        assert torch.equal(together, torch.cat(parts))
        assert all(together.untyped_storage().data_ptr() != p.untyped_storage().data_ptr() for p in parts)


def test_no_rows_at_all() -> None:
    group = AloneGroup("experts", 0, 2)
    splits, local = count(group, torch.zeros(4, dtype=torch.int64))
    rows = torch.empty(0, 3)
    assert splits.outward(group, rows).shape == splits.back(group, rows).shape == (0, 3)
    assert local.tolist() == [0, 0]
