"""The exchange of rows with experts: to them and back, with sizes that are counted during the step.

Rows leave a device grouped by expert, so they are grouped by receiver too. They arrive grouped by sender, and
are put in the order of the local experts; the way back undoes both.

Where experts have clones, rows leave in the order of their experts, and each expert's are divided among its
copies. All devices of a group know the counts of all, so that each divides them in the same way.

The host must know how many rows travel before it can send them. On an accelerator the numbers are copied to
the host where the rows are counted. The host waits for that copy only where the first rows leave, so that the
instructions between the two overlap with it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper.plan.bucket import Bucket
from piper.plan.expert_table import ExpertTable, first_table, fits
from piper.runtime.accelerator import is_accelerator, module
from piper.runtime.comm.base import Group, joined

TABLES = "piper_experts"  # the field of a batch that says where experts are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many rows travel, as the host knows it."""

    gives: list[int]  # to each member
    gets: list[int]  # from each member
    blocks: list[list[int]]  # rows received: by sender, then by expert
    given: list[list[int]] = field(default_factory=list, compare=False)  # sent: by member, by slot


@dataclass(slots=True, kw_only=True)
class Splits:
    """How many rows travel between this device and each member of its expert group, by expert."""

    given: Tensor  # [member, expert of that member]: rows this device sends
    taken: Tensor  # [member, own expert]: rows this device receives
    counts: Tensor  # both, on the host
    arrival: torch.Event | None = None  # after which `counts` can be read; None: at once
    known: Lengths | None = None
    order: tuple[
        int, ...
    ] = ()  # of the slots that rows go to, as rows leave. Empty: from the first to the last

    def lengths(self) -> Lengths:
        """Return the numbers of rows; the first call waits for them."""
        if self.known is None:
            if self.arrival is not None:
                self.arrival.synchronize()
            sent, blocks = self.counts.tolist()
            gives, gets = ([sum(row) for row in rows] for rows in (sent, blocks))
            self.known = Lengths(given=sent, gives=gives, gets=gets, blocks=blocks)
        return self.known


def count(group: Group, counts: Tensor) -> tuple[Splits, Tensor]:
    """Agree on how many rows travel; also the rows that each local expert will get."""
    given = counts.view(group.size, -1).clone()  # the counts may be freed before the rows have come back
    taken = torch.stack(group.swap([row.view(1, -1) for row in given], [1] * group.size)).view_as(given)
    here, arrival = on_its_way(torch.stack((given, taken)))
    return Splits(given=given, taken=taken, counts=here, arrival=arrival), taken.sum(0)


def field_of_tables(tables: Mapping[str, ExpertTable], cloned: Mapping[str, Bucket]) -> Tensor:
    """Return tables of experts as a field of a batch: a step is repeated with those that it had.

    cloned: a bucket of each region whose experts have clones. All regions are in it, one after the other.
    """
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
        numbers = (torch.tensor(each, device=device) for each in (experts, before, until, whole))
        return cls(
            **dict(zip(("experts", "before", "until", "whole"), numbers, strict=True)), order=tuple(order)
        )

    def rows(self, counts: Tensor) -> Tensor:
        """Return how many rows each sender gives to each slot, given how many it has for each expert.

        Where they do not divide evenly, senders begin at different copies.
        """
        rows = counts[:, self.experts]
        senders = torch.arange(len(counts), device=counts.device).view(-1, 1)
        first = senders * self.whole // len(counts)
        return (rows * self.until + first) // self.whole - (rows * self.before + first) // self.whole


def count_divided(group: Group, counts: Tensor, division: Division) -> tuple[Splits, Tensor, Tensor]:
    """Agree on how many rows travel where experts have clones; also the rows of each slot and each expert."""
    everyone = torch.cat(group.swap([counts.view(1, -1)] * group.size, [1] * group.size))
    rows = division.rows(everyone).view(group.size, group.size, -1)
    given, taken = rows[group.rank], rows[:, group.rank].contiguous()
    here, arrival = on_its_way(torch.stack((given, taken)))
    splits = Splits(given=given, taken=taken, counts=here, arrival=arrival, order=division.order)
    return splits, taken.sum(0), everyone.sum(0)


def on_its_way(value: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Start the copy of a value to the host; return it, and the event after which it can be read.

    The host does not wait. None: the value can be read at once.
    """
    if not is_accelerator(value.device):
        return value, None
    here = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    arrival = module(value.device).Event()
    arrival.record(module(value.device).current_stream(value.device))
    return here, arrival


def outward(group: Group, rows: Tensor, splits: Splits) -> Tensor:
    """Send rows to their experts, and return those that arrived, sorted by expert."""
    lengths = splits.lengths()
    if splits.order:
        sizes = [rows for member in lengths.given for rows in member]
        blocks = dict(zip(splits.order, rows.split([sizes[slot] for slot in splits.order]), strict=True))
        rows = torch.cat([blocks[slot] for slot in sorted(blocks)])
    arrived = group.all_to_all(rows, lengths.gives, lengths.gets)
    by_sender = [part.split(block) for part, block in zip(arrived, lengths.blocks, strict=True)]
    return torch.cat([blocks[expert] for expert in range(len(lengths.blocks[0])) for blocks in by_sender])


def back(group: Group, rows: Tensor, splits: Splits) -> Tensor:
    """Send rows back to where they came from, and return those that came back, in the order they left."""
    lengths = splits.lengths()
    experts, senders = len(lengths.blocks[0]), group.size
    by_expert = [lengths.blocks[sender][expert] for expert in range(experts) for sender in range(senders)]
    blocks = rows.split(by_expert)
    by_sender = torch.cat([blocks[e * senders + s] for s in range(senders) for e in range(experts)])
    returned = joined(group.all_to_all(by_sender, lengths.gets, lengths.gives), whole=True)
    if not splits.order:
        return returned
    sizes = [rows for member in lengths.given for rows in member]
    by_slot = returned.split(sizes)
    return torch.cat([by_slot[slot] for slot in splits.order])
