"""Rows on their way to experts and back, on one device of two with two experts: in numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.runtime.comm.base import Group, joined
from piper.runtime.expert_exchange import Splits, count


class Peer(Group):
    """A group of two, of which the other member gives what it is told to."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__("pair", 0, 2)
        self.given = given
        self.took: list[list[float]] = []

    def swap(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        self.took.append(parts[1].flatten().tolist())
        theirs = self.given.pop(0)
        assert [len(parts[0]), len(theirs)] == list(lengths)
        return [parts[0], theirs]


def test_rows_arrive_by_expert_and_return_by_owner() -> None:
    """We have rows 1 to 6 for experts 0, 0, 1 | 2, 3, 3; the peer sends 10 for expert 0, and 11, 12 for 1."""
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    theirs = torch.tensor([[10.0], [11.0], [12.0]])
    group = Peer([torch.tensor([[1, 2]]), theirs, torch.tensor([[40.0], [50.0], [60.0]])])
    splits, local = count(group, torch.tensor([2, 1, 1, 2]))
    assert isinstance(splits, Splits)
    assert local.tolist() == [3, 3]  # of expert 0: two of ours and one of theirs
    arrived = splits.outward(group, rows)
    assert arrived.flatten().tolist() == [1.0, 2.0, 10.0, 3.0, 11.0, 12.0]
    returned = splits.back(group, arrived)
    assert returned.flatten().tolist() == [1.0, 2.0, 3.0, 40.0, 50.0, 60.0]
    assert group.took == [[1, 2], [4.0, 5.0, 6.0], [10.0, 11.0, 12.0]]


def test_parts_that_do_not_follow_each_other_are_copied() -> None:
    rows = torch.arange(6.0).view(6, 1)
    cases = [
        [rows[:2], rows[3:]],
        [rows[2:4], rows[:2], rows[4:]],
        [rows[:2], rows[4:], rows[2:4]],
        [rows[1:]],
    ]
    for parts in cases:
        assert torch.equal(joined(parts, whole=True), torch.cat(parts))
    assert joined([rows[:2], rows[2:]], whole=True).data_ptr() == rows.data_ptr()
    assert joined([rows[1:]], whole=True).data_ptr() != rows[1:].data_ptr()  # it would hold the first row too
