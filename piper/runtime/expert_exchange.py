"""The exchange of rows with experts: to them and back, with sizes that are counted during the step.

Rows leave a device grouped by expert, so they are grouped by receiver too. They arrive grouped by sender, and
are put in the order of the local experts; the way back undoes both.

Where experts have clones, rows leave in the order of their experts, and each expert's are divided among its
copies. All devices of a group know the counts of all, so that each divides them in the same way.

The host must know how many rows travel before it can send them. On an accelerator the numbers are copied to
the host where the rows are counted. The host waits for that copy only where the first rows leave, so that the
instructions between the two overlap with it.

[Note: blocks] Where rows travel in blocks of a fixed size, nothing that the host must know is counted. Each
device sends a block of rows to each device of its group. A block that has fewer rows is filled up with others
of the device. A device puts the rows that arrive in the order of its experts. Behind them it repeats the last
one as often as rows fill blocks, as rows of the same expert: they are computed, but nothing reads their
results, and their gradients are zero. So the counts cover all rows, each sum of gradients is the same, and
rows that fill blocks give infinity or NaN only where a row does that was sent.

Where more rows go to a device than a block has, the exchange says so and leaves some out: its numbers are
those of no step, which is then run again with as many rows as are counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from piper.plan.bucket import Bucket
from piper.plan.expert_table import ExpertTable, first_table, fits
from piper.runtime.accelerator import is_accelerator, module
from piper.runtime.comm.base import Group, joined

TABLES = "piper_experts"  # the field of a batch that says where experts are computed
Rows = list[list[int]]  # by member of a group, and by expert


@dataclass(slots=True, kw_only=True)
class Splits:
    """How many rows travel between this device and each member of its expert group, by expert."""

    counts: Tensor  # on the host: rows that this device sends to each member, and those that it receives
    arrival: torch.Event | None = None  # after which `counts` can be read; None: at once
    order: tuple[int, ...] = ()  # of the slots that rows go to, as rows leave. Empty: first to last
    known: tuple[Rows, Rows] | None = None

    def lengths(self) -> tuple[Rows, Rows]:
        """Return the rows that are sent, and those that are received; the first call waits for them."""
        if self.known is None:
            if self.arrival is not None:
                self.arrival.synchronize()
            sent, received = self.counts.tolist()
            self.known = sent, received
        return self.known

    def outward(self, group: Group, rows: Tensor, *, gradients: bool = False) -> Tensor:
        """Send rows to their experts, and return those that arrived, sorted by expert."""
        sent, received = self.lengths()
        if self.order:
            sizes = list(chain(*sent))
            blocks = dict(zip(self.order, rows.split([sizes[slot] for slot in self.order]), strict=True))
            rows = torch.cat([blocks[slot] for slot in sorted(blocks)])
        arrived = group.all_to_all(rows, list(map(sum, sent)), list(map(sum, received)))
        by_sender = [part.split(sizes) for part, sizes in zip(arrived, received, strict=True)]
        return torch.cat([blocks[expert] for expert in range(len(received[0])) for blocks in by_sender])

    def back(self, group: Group, rows: Tensor) -> Tensor:
        """Send rows back to where they came from, and return those that came back, in the order they left."""
        sent, received = self.lengths()
        experts, senders = len(received[0]), group.size
        blocks = rows.split(list(chain(*zip(*received, strict=True))))
        by_sender = torch.cat([blocks[e * senders + s] for s in range(senders) for e in range(experts)])
        arrived = group.all_to_all(by_sender, list(map(sum, received)), list(map(sum, sent)))
        returned = joined(arrived, whole=True)
        if not self.order:
            return returned
        by_slot = returned.split(list(chain(*sent)))
        return torch.cat([by_slot[slot] for slot in self.order])


def count(group: Group, counts: Tensor) -> tuple[Splits, Tensor]:
    """Agree on how many rows travel; also the rows that each local expert will get."""
    given, taken = swapped_counts(group, counts)
    return splits_of(given, taken), taken.sum(0)


def swapped_counts(group: Group, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that this device has for each expert of a member, and that members have for its own."""
    given = counts.view(group.size, -1)
    taken = group.swap([row.view(1, -1) for row in given], [1] * group.size)
    return given, torch.stack(taken).view_as(given)


def field_of_tables(tables: Mapping[str, ExpertTable], cloned: Mapping[str, Bucket]) -> Tensor:
    """Return tables of experts as a field of a batch: a step is repeated with those that it had."""
    # cloned: a bucket of each region whose experts have clones. All regions are in it, one after the other.
    chosen = [tables.get(region) or first_table(*bucket.table_sizes) for region, bucket in cloned.items()]
    return torch.cat([torch.tensor([table.experts, table.shares]).view(-1) for table in chosen])


def tables_of_field(field: Tensor, cloned: Mapping[str, Bucket]) -> dict[str, ExpertTable]:
    """Return the tables of experts in a field of a batch. None of them fit where there are other devices."""
    shapes = [(2, devices, own + more) for devices, own, more in (b.table_sizes for b in cloned.values())]
    if sum(map(math.prod, shapes)) != len(field):
        return {}
    parts = field.split([math.prod(shape) for shape in shapes])
    tables = {}
    for (region, bucket), part, shape in zip(cloned.items(), parts, shapes, strict=True):
        experts, shares = (tuple(map(tuple, rows)) for rows in part.view(shape).tolist())
        table = ExpertTable(experts=experts, shares=shares)
        if fits(table, *bucket.table_sizes):
            tables[region] = table
    return tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the rows of each expert are divided among the slots that hold it, on a device."""

    experts: Tensor  # by slot of all devices, one device after the other
    before: Tensor  # by slot: the shares of the slots before it that hold the same expert
    until: Tensor  # and with its own
    whole: Tensor  # and of all of them
    order: tuple[int, ...]  # the slots by expert

    @classmethod
    def of(cls, table: ExpertTable, device: torch.device) -> "Division":
        """Return the division that a table says."""
        slots = sum(map(len, table.experts))
        width = slots // len(table.experts)
        experts, before, until, whole = [0] * slots, [0] * slots, [0] * slots, [1] * slots
        order = []
        for expert, copies in sorted(table.copies().items()):
            end, total = 0, sum(table.shares[place][slot] for place, slot in copies)
            for place, slot in copies:
                at = place * width + slot
                experts[at], before[at], whole[at] = expert, end, total
                end += table.shares[place][slot]
                until[at] = end
                order.append(at)
        rows = torch.tensor([experts, before, until, whole], device=device)
        return cls(experts=rows[0], before=rows[1], until=rows[2], whole=rows[3], order=tuple(order))

    def rows(self, counts: Tensor) -> Tensor:
        """Return how many rows each sender gives to each slot, given how many it has for each expert."""
        # Where they do not divide evenly, senders begin at different copies.
        rows = counts[:, self.experts]
        senders = torch.arange(len(counts), device=counts.device).view(-1, 1)
        first = senders * self.whole // len(counts)
        return (rows * self.until + first) // self.whole - (rows * self.before + first) // self.whole


def count_divided(group: Group, counts: Tensor, division: Division) -> tuple[Splits, Tensor, Tensor]:
    """Agree on how many rows travel where experts have clones; also the rows of each slot and each expert."""
    everyone = torch.cat(group.swap([counts.view(1, -1)] * group.size, [1] * group.size))
    rows = division.rows(everyone).view(group.size, group.size, -1)
    given, taken = rows[group.rank], rows[:, group.rank].contiguous()
    return splits_of(given, taken, division.order), taken.sum(0), everyone.sum(0)


def splits_of(given: Tensor, taken: Tensor, order: tuple[int, ...] = ()) -> Splits:
    """Return how rows travel. The numbers are on their way to the host, which does not wait."""
    counts = torch.stack((given, taken))
    if not is_accelerator(counts.device):
        return Splits(counts=counts, order=order)
    here = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
    arrival = module(counts.device).Event()
    arrival.record(module(counts.device).current_stream(counts.device))
    return Splits(counts=here, arrival=arrival, order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Where rows lie on their way: at places of blocks, one for each member of the group. [Note: blocks]"""

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
    """Agree on where `rows` lie in blocks; also the rows of own experts, and whether some are left out."""
    given, taken = swapped_counts(group, counts)
    sent = given.sum(1)
    ends = sent.cumsum(0)
    first = (ends - sent).view(-1, 1)
    place = torch.arange(size, device=counts.device)
    row = torch.arange(rows, device=counts.device)
    member = torch.bucketize(row, ends, right=True).clamp(max=group.size - 1)
    order, local, used = _sorted_places(taken, place)
    places = torch.arange(len(order), device=counts.device)
    blocks = Blocks(
        size=size,
        source=(first + place).clamp(max=rows - 1).view(-1),
        target=torch.empty_like(order).scatter_(0, order, places),
        order=order.index_select(0, places.minimum((used - 1).clamp(min=0))),
        fills=places >= used,
        home=member * size + (row - first.view(-1)[member]).clamp(max=size - 1),
    )
    return blocks, local, (sent > size).any() | (ends[-1] != rows)  # a step that is run again refuses counts


def refuse_counts(wrong: Tensor) -> None:
    """End the step where counts do not add up to the rows. On an accelerator no host waits to see it."""
    torch._assert_async(~wrong, "the counts of a route do not add up to its rows")


def _sorted_places(taken: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the blocks that arrive in the order of the experts, and the counts of these.

    The last result is how many of the rows do not only fill blocks: those come first. The others count for
    the last expert that has rows.

    taken: [member, own expert], the rows that members have for this device.
    """
    (members, experts), size = taken.shape, len(place)
    ends = taken.cumsum(1).clamp(max=size)  # in the block of each member
    # The expert of a row; where it only fills its block, a number behind theirs.
    expert = torch.searchsorted(ends, place.repeat(members, 1), right=True, out_int32=True)
    local = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).sum(0)
    total = ends[:, -1].sum()
    number = torch.arange(experts, device=place.device)
    last = (number * (local > 0)).max()
    local += (number == last) * (members * size - total)
    return expert.view(-1).argsort(stable=True), local, total
