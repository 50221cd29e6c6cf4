"""The exchange of rows with experts in blocks of a fixed size: nothing that the host must know is counted.

Each device sends a block of rows to each device of its group. A block that has fewer rows is filled up with
others of the device. A device puts the rows that arrive in the order of its experts. Behind them it repeats
the last one as often as rows fill blocks, as rows of the same expert: they are computed, but nothing reads
their results, and their gradients are zero. So the counts cover all rows, each sum of gradients is the same,
and rows that fill blocks give infinity or NaN only where a row does that was sent.

Where more rows go to a device than a block has, the exchange says so and leaves some out: its numbers are
those of no step, which is then run again with as many rows as are counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.comm.base import Group, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where rows lie on their way: at places of blocks, one block for each member of the group."""

    size: int
    source: Tensor  # by place: the row that leaves from it
    target: Tensor  # by place of the blocks that arrive: the place in the order of the experts
    order: Tensor  # by that place: the place in the blocks that arrived
    fills: Tensor  # by that place: whether its row only fills a block
    home: Tensor  # by row: the place at which it comes back

    def outward(self, group: Group, rows: Tensor, *, gradients: bool) -> Tensor:
        """Send rows to their experts, and return those that arrived, sorted by expert."""
        taken = self._swapped(group, rows.index_select(0, self.source)).index_select(0, self.order)
        if gradients:
            taken.masked_fill_(self.fills.view(-1, *[1] * (taken.dim() - 1)), 0)
        return taken

    def back(self, group: Group, rows: Tensor) -> Tensor:
        """Send rows back to where they came from, and return those that came back, in the order they left."""
        return self._swapped(group, rows.index_select(0, self.target)).index_select(0, self.home)

    def _swapped(self, group: Group, rows: Tensor) -> Tensor:
        sizes = [self.size] * group.size
        return joined(group.all_to_all(rows, sizes, sizes), whole=True)


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
    target, local, used = _sorted_places(taken, place)
    places = torch.arange(len(target), device=counts.device)
    order = torch.empty_like(target).scatter_(0, target, places)
    blocks = Blocks(
        size=size,
        source=(first + place).clamp(max=rows - 1).view(-1),
        target=target,
        order=order.index_select(0, places.minimum((used - 1).clamp(min=0))),
        fills=places >= used,
        home=member * size + (row - first.view(-1)[member]).clamp(max=size - 1),
    )
    return blocks, local, (sent > size).any() | (ends[-1] != rows)  # a step that is run again refuses counts


def refuse_counts(wrong: Tensor) -> None:
    """End the step where counts do not add up to the rows. On an accelerator no host waits to see it."""
    torch._assert_async(~wrong, "the counts of a route do not add up to its rows")


def _sorted_places(taken: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each row of the blocks that arrive lies in the order of the experts, and their counts.

    The last result is how many of the rows do not only fill blocks: those come first. The others count for
    the last expert that has rows.

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
    total = used.sum()
    target = torch.where(expert < experts, sorted_place, total + before + place)
    local = sizes.sum(0)
    number = torch.arange(experts, device=place.device)
    last = (number * (local > 0)).max()
    return target.view(-1), local + (number == last) * (members * size - total), total
