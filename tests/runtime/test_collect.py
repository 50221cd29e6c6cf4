"""Parts of a value as members of a group hold them: taken apart for a collective, and joined after it."""

import pytest
import torch

from piper.ir.sharding import Shard
from piper.runtime.comm.synthetic import AloneGroup
from piper.runtime.kernels import apart, joined, part

VALUE = torch.arange(16).view(2, 8)
PARTS = [  # the columns that each of two members holds
    (Shard(dim=1), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (Shard(dim=1, blocks=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (Shard(dim=1, zigzag=True), [[0, 1, 6, 7], [2, 3, 4, 5]]),
    (Shard(dim=1, blocks=2, zigzag=True), [[0, 3, 4, 7], [1, 2, 5, 6]]),
]


@pytest.mark.parametrize(("shard", "columns"), PARTS)
def test_parts_are_taken_apart_and_joined(shard: Shard, columns: list[list[int]]) -> None:
    wanted = torch.stack([VALUE[:, own] for own in columns])
    parts = apart(VALUE, shard, 2)
    assert torch.equal(parts, wanted)
    assert parts.is_contiguous()
    assert [part(VALUE, shard, 2, place).tolist() for place in (0, 1)] == wanted.tolist()
    assert torch.equal(joined(wanted, shard), VALUE)


def test_nothing_is_copied_where_nothing_lies_before_the_divided_dimension() -> None:
    one_sample = torch.randn(1, 8, 4)
    parts = apart(one_sample, Shard(dim=1), 2)
    assert parts.data_ptr() == one_sample.data_ptr()
    assert joined(parts, Shard(dim=1)).data_ptr() == one_sample.data_ptr()


def test_a_members_own_part_has_memory_of_its_own() -> None:
    value = torch.randn(4, 2)
    assert part(value, Shard(dim=0), 2, 0).data_ptr() != value.data_ptr()


def test_a_device_alone_gets_its_own_values() -> None:
    group = AloneGroup("tp", 1, 2)
    out = torch.zeros(6)
    group.all_gather(torch.tensor([1.0, 2.0, 3.0]), out)
    assert out.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    out[3:] = torch.tensor([4.0, 5.0, 6.0])
    group.all_gather(out[3:], out)
    assert out.tolist() == [4.0, 5.0, 6.0, 4.0, 5.0, 6.0]
    term = torch.tensor([1.0, 2.0, 3.0, 4.0])
    own = group.reduce_scatter(term, 2)
    assert own.tolist() == [3.0, 4.0]
    assert own.data_ptr() != term[2:].data_ptr()
    assert group.reduce_scatter(torch.tensor([1.0, 2.0, 3.0]), 2).tolist() == [3.0, 0.0]
