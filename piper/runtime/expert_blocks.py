"""The exchange of rows with experts in blocks of a fixed size: nothing that the host must know is counted.

Each device sends a block of rows to each device of its group. A block that has fewer rows is filled up with
others of the device: they are computed, but nothing reads their results, and their gradients are zero. A
device puts the rows that arrive in the order of its experts, and those that fill blocks behind them, as rows
of its last expert. So the counts cover all rows, and each sum of gradients is the same.

Where more rows go to a device than a block has, the exchange says so and leaves some out: its numbers are
those of no step, which is then run again with as many rows as are counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.comm.base import Group
from piper.runtime.expert_exchange import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where rows lie on their way: at places of blocks, one block for each member of the group."""

    size: int
    source: Tensor  # by place: the row that leaves from it
    fills: Tensor  # by place: whether that row only fills the block
    target: Tensor  # by place of the blocks that arrive: the place in the order of the experts
    order: Tensor  # by that place: the place in the blocks that arrived
    home: Tensor  # by row: the place at which it comes back

    def outward(self, group: Group, rows: Tensor, *, gradients: bool) -> Tensor:
        """Send rows to their experts, and return those that arrived, sorted by expert."""
        sent = rows.index_select(0, self.source)
        if gradients:
            sent.masked_fill_(self.fills.view(-1, *[1] * (sent.dim() - 1)), 0)
        return self._swapped(group, sent).index_select(0, self.order)

    def back(self, group: Group, rows: Tensor) -> Tensor:
        """Send rows back to where they came from, and return those that came back, in the order they left."""
        return self._swapped(group, rows.index_select(0, self.target)).index_select(0, self.home)

    def _swapped(self, group: Group, rows: Tensor) -> Tensor:
        sizes = [self.size] * group.size
        return whole(group.all_to_all(rows, sizes, sizes))


def count_blocks(group: Group, counts: Tensor, rows: int, size: int) -> tuple[Blocks, Tensor, Tensor]:
    """Agree on where rows lie in blocks; also the rows of each local expert, and whether some are left out.

    counts: rows of this device for each expert, `rows` in all.
    """
    given = counts.view(group.size, -1)
    taken = torch.stack(group.swap([row.view(1, -1) for row in given], [1] * group.size)).view_as(given)
    sent = given.sum(1)
    ends = sent.cumsum(0)
    first = (ends - sent).view(-1, 1)
    place = torch.arange(size, device=counts.device)
    row = torch.arange(rows, device=counts.device)
    member = torch.bucketize(row, ends, right=True).clamp(max=group.size - 1)
    target, local = _sorted_places(taken, place)
    blocks = Blocks(
        size=size,
        source=(first + place).clamp(max=rows - 1).view(-1),
        fills=(place >= sent.view(-1, 1)).view(-1),
        target=target,
        order=torch.empty_like(target).scatter_(0, target, torch.arange(len(target), device=counts.device)),
        home=member * size + (row - first.view(-1)[member]).clamp(max=size - 1),
    )
    return blocks, local, (sent > size).any() | (ends[-1] != rows)  # a step that is run again refuses counts


def _sorted_places(taken: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row of the blocks that arrive lies in the order of the experts, and their counts.

    taken: [member, own expert], the rows that members have for this device.
    """
    (members, experts), size = taken.shape, len(place)
    ends = taken.cumsum(1).clamp(max=size)  # in the block of each member
    sizes = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    by_expert = sizes.t().reshape(-1)
    begins = (by_expert.cumsum(0) - by_expert).view(experts, members).t()
    expert = torch.searchsorted(ends, place.repeat(members, 1), right=True)
    own = expert.clamp(max=experts - 1)
    sorted_place = (begins - ends + sizes).gather(1, own) + place
    used = ends[:, -1:]
    before = torch.arange(members, device=place.device).view(-1, 1) * size - used.cumsum(0)
    local = sizes.sum(0)
    target = torch.where(expert < experts, sorted_place, used.sum() + before + place)
    local[-1] += members * size - used.sum()
    return target.view(-1), local
