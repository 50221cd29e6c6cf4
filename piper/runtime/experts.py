"""Rows on their way to experts and back: uneven, as counted during the step.

Rows leave a device grouped by expert, so they are grouped by receiver too. They arrive grouped by sender, and
are put in the order of the local experts; the way back undoes both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.comm.base import Group


@dataclass(slots=True)
class Splits:
    """How many rows travel between this device and each member of its expert group, by expert."""

    given: Tensor  # [member, expert of that member]: rows this device sends
    taken: Tensor  # [member, own expert]: rows this device receives
    gives: list[int]
    gets: list[int]
    blocks: list[list[int]]  # rows received: by sender, then by expert


def count(group: Group, counts: Tensor) -> tuple[Splits, Tensor]:
    """Agree on how many rows travel; also the rows that each local expert will get."""
    given = counts.view(group.size, -1).clone()  # the counts may be freed before the rows have come back
    taken = torch.stack(group.swap([row.view(1, -1) for row in given], [1] * group.size)).view_as(given)
    sent, blocks = torch.stack((given, taken)).tolist()  # one copy: the host waits for this stream here
    gives, gets = ([sum(row) for row in rows] for rows in (sent, blocks))
    return Splits(given, taken, gives, gets, blocks), taken.sum(0)


def outward(group: Group, rows: Tensor, splits: Splits) -> Tensor:
    """Rows to their experts."""
    arrived = group.all_to_all(rows, splits.gives, splits.gets)
    by_sender = [part.split(lengths) for part, lengths in zip(arrived, splits.blocks, strict=True)]
    return torch.cat([blocks[expert] for expert in range(len(splits.blocks[0])) for blocks in by_sender])


def back(group: Group, rows: Tensor, splits: Splits) -> Tensor:
    """Rows to where they came from, in the order they left."""
    experts, senders = len(splits.blocks[0]), group.size
    lengths = [splits.blocks[sender][expert] for expert in range(experts) for sender in range(senders)]
    blocks = rows.split(lengths)
    by_sender = torch.cat([blocks[e * senders + s] for s in range(senders) for e in range(experts)])
    return torch.cat(group.all_to_all(by_sender, splits.gets, splits.gives))
