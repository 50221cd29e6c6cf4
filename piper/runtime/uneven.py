"""Batches whose samples do not divide into equal slices: rows are repeated, and each slice knows its samples.

A slice of 6 rows may hold 6 samples, 3 samples twice, 2 three times, 1 six times, or copies without weight.
Every sample of a slice occurs equally often, so the mean of the rows is the mean of the samples, and a sum
counts by the share of the rows that are different samples. All slices have as many rows, as plans need.
"""

from collections.abc import Callable, Mapping
from functools import wraps

import torch
from torch import Tensor, nn

from piper.errors import ConfigError
from piper.ir.chunk import CapturedModel
from piper.job import Loss, Mean, Metrics
from piper.plan.plan import Plans
from piper.runtime.compute import parts_of, slices, slices_of

COUNTS = "piper_samples_in_slice"  # the field of a batch that says how many samples each row's slice holds
Weighted = tuple[Tensor, Tensor]


def divides(batch: Mapping[str, Tensor], plans: Plans) -> bool:
    """Return whether the samples of a batch divide into the slices of some plans."""
    return len(next(iter(batch.values()))) % slices_of(plans) == 0


def filled(batch: Mapping[str, Tensor], plans: Plans, outline: CapturedModel) -> dict[str, Tensor]:
    """Return a batch whose rows divide into slices, with the field of how many samples each slice holds."""
    samples, chunk = len(next(iter(batch.values()))), outline.loss.chunk
    degree = next(outline.degree(one) for one in outline.chunks if one.name == chunk)
    places = len(plans.chunks[chunk].devices) // degree
    parts = sorted(parts_of(plans, chunk))
    each = places * len(parts)  # the slices of the loss: other chunks may have more
    rows, counts = arranged(samples, each, slices_of(plans) // each)
    groups = len(plans.groups_apart)
    if not all(
        sum(counts[number * each // groups : (number + 1) * each // groups]) for number in range(groups)
    ):
        raise ConfigError(
            f"{samples} samples leave a group that trains apart without any",
            by="step",
            facts={"groups": str(groups), "slices": f"{each}, of which each holds at most {rows} samples"},
            hint="drop the last batch where it is smaller, or average fewer groups",
        )
    order = torch.zeros(rows * each, dtype=torch.int64)
    held = torch.zeros(rows * each, dtype=torch.int64)
    first, number = 0, 0
    for place in range(places):
        for part in parts:
            spans = slices(plans, rows * each, place, places, part)
            at = torch.cat([torch.arange(low, high) for low, high in spans])
            count = counts[number]
            order[at] = first + torch.arange(rows) % count if count else 0
            held[at] = count
            first, number = first + count, number + 1
    rows_of = {name: field[order] for name, field in batch.items() if field.shape[:1] == (samples,)}
    return {**batch, **rows_of, COUNTS: held}


def arranged(samples: int, pieces: int, multiple: int) -> tuple[int, list[int]]:
    """Return the rows of each slice, as few as possible, and how many samples each of the slices holds.

    The number of samples in a slice divides its rows, or is 0. multiple: the rows are a multiple of this.
    """
    rows = -(-samples // (pieces * multiple)) * multiple
    while True:
        for full in range(min(pieces, samples // rows), -1, -1):
            rest = samples - full * rows
            if rest >= 2 * rows:
                break
            found = fewest(rest, [n for n in range(1, rows + 1) if rows % n == 0])
            if full + len(found) <= pieces:
                counts = [rows] * full + found
                return rows, counts + [0] * (pieces - len(counts))
        rows += multiple


def fewest(total: int, numbers: list[int]) -> list[int]:
    """Return the fewest of some numbers, which may repeat and include 1, that add up to a total."""
    best: list[tuple[int, ...]] = [()]
    for value in range(1, total + 1):
        best.append(min(((n, *best[value - n]) for n in numbers if n <= value), key=len))
    return sorted(best[total], reverse=True)


def counted_loss(loss: Loss) -> Callable[..., Weighted | tuple[Weighted, Metrics]]:
    """Return a loss that counts the samples of a slice, of which some are repeated, each once."""

    @wraps(loss)
    def counted(model: nn.Module, batch: Mapping[str, Tensor]) -> Weighted | tuple[Weighted, Metrics]:
        count, rows = batch[COUNTS][0].double(), len(batch[COUNTS])
        share = count / rows
        returned = loss(model, {name: field for name, field in batch.items() if name != COUNTS})
        if isinstance(returned, tuple) and isinstance(returned[1], Mapping):
            metrics = {name: (total * share, weight * share) for name, (total, weight) in returned[1].items()}
            return scaled(returned[0], count, share), metrics
        return scaled(returned, count, share)

    return counted


def scaled(returned: Mean, count: Tensor, share: Tensor) -> Weighted:
    """Return a sum and a weight that count the samples of a slice once each."""
    if isinstance(returned, tuple):
        return (returned[0] * share).to(returned[0].dtype), returned[1] * share
    return (returned * count).to(returned.dtype), count
