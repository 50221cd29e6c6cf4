"""The exchange of rows with experts: to them and back, with sizes that are counted during the step.

Rows leave a device grouped by expert, so they are grouped by receiver too. They arrive grouped by sender, and
are put in the order of the local experts; the way back undoes both.

The host must know how many rows travel before it can send them. On an accelerator the numbers are copied to
the host where the rows are counted. The host waits for that copy only where the first rows leave, so that the
instructions between the two overlap with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.accelerator import is_accelerator, module
from piper.runtime.comm.base import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many rows travel, as the host knows it."""

    gives: list[int]  # to each member
    gets: list[int]  # from each member
    blocks: list[list[int]]  # rows received: by sender, then by expert


@dataclass(slots=True, kw_only=True)
class Splits:
    """How many rows travel between this device and each member of its expert group, by expert."""

    given: Tensor  # [member, expert of that member]: rows this device sends
    taken: Tensor  # [member, own expert]: rows this device receives
    counts: Tensor  # both, on the host
    arrival: torch.Event | None = None  # after which `counts` can be read; None: at once
    known: Lengths | None = None

    def lengths(self) -> Lengths:
        """Return the numbers of rows; the first call waits for them."""
        if self.known is None:
            if self.arrival is not None:
                self.arrival.synchronize()
            sent, blocks = self.counts.tolist()
            gives, gets = ([sum(row) for row in rows] for rows in (sent, blocks))
            self.known = Lengths(gives=gives, gets=gets, blocks=blocks)
        return self.known


def count(group: Group, counts: Tensor) -> tuple[Splits, Tensor]:
    """Agree on how many rows travel; also the rows that each local expert will get."""
    given = counts.view(group.size, -1).clone()  # the counts may be freed before the rows have come back
    taken = torch.stack(group.swap([row.view(1, -1) for row in given], [1] * group.size)).view_as(given)
    here, arrival = on_its_way(torch.stack((given, taken)))
    return Splits(given=given, taken=taken, counts=here, arrival=arrival), taken.sum(0)


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
    return whole(group.all_to_all(by_sender, lengths.gets, lengths.gives))


def whole(parts: Sequence[Tensor]) -> Tensor:
    """Join parts one after another: return a view of the tensor that they cover, else a copy."""
    first = parts[0]
    storage, place = first.untyped_storage(), first.storage_offset()
    for part in parts:
        apart = part.untyped_storage().data_ptr() != storage.data_ptr() or not part.is_contiguous()
        if apart or part.storage_offset() != place:
            return torch.cat(list(parts))
        place += part.numel()
    if first.storage_offset() or place * first.element_size() != storage.nbytes():
        return torch.cat(list(parts))
    row = math.prod(first.shape[1:])
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), (row, *first.stride()[1:]))
