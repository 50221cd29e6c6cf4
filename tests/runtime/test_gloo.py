"""What gloo's groups do without a peer."""

import torch

from piper.runtime.comm.base import joined


def test_neighbouring_parts_are_not_copied() -> None:
    flat = torch.arange(12.0).view(6, 2)
    for lengths in ([2, 4], [0, 6], [2, 0, 4], [6, 0]):
        assert joined(flat.split(lengths)).data_ptr() == flat.data_ptr()
        assert torch.equal(joined(flat.split(lengths)), flat)


def test_other_parts_are_joined_in_their_order() -> None:
    flat = torch.arange(12.0).view(6, 2)
    assert torch.equal(joined([flat[4:], flat[:1]]), torch.cat([flat[4:], flat[:1]]))
    assert torch.equal(joined([flat, flat]), torch.cat([flat, flat]))
    turned = flat.t()
    assert torch.equal(joined([turned[:1], turned[1:]]), turned)
    assert joined([flat[:0], flat[:0]]).shape == (0, 2)
