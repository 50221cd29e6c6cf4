"""Puts packed documents into an order in which each device of a group attends to as many keys."""

from collections.abc import Mapping

import torch
from torch import Tensor

from piper.errors import ConfigError

PLACES = "places"


def balance_documents(
    batch: Mapping[str, Tensor], *, ways: int, documents: str = "documents", piece: int = 128
) -> dict[str, Tensor]:
    """Return a batch whose sequences shard over `ways` devices into slices of equal length and equal work.

    Each sequence is cut into pieces of `piece` tokens, and each device gets as many of them. The work of a
    piece is the number of keys that its tokens see: those of their document up to their own place. Every
    field of [samples, length, ...] is put into the new order, and the field `places` says where each token
    was. So a mask compares places, not indices: `places[b, i] >= places[b, j]`.

    documents: the field with the number of each token's document.
    """
    if documents not in batch or batch[documents].dim() != 2 or PLACES in batch:
        raise ConfigError(
            f"the batch cannot be balanced by its field {documents!r}",
            by="balance_documents",
            facts={"fields": ", ".join(f"{name} {list(field.shape)}" for name, field in batch.items())},
            hint=f"name the field with the document of each token, [samples, length]; {PLACES!r} is added",
        )
    numbers = batch[documents]
    samples, length = numbers.shape
    if ways < 1 or piece < 1 or length % (ways * piece):
        raise ConfigError(
            f"{length} tokens do not make pieces of {piece} for {ways} devices",
            by="balance_documents",
            facts={"field": f"{documents} {list(numbers.shape)}", "needed": f"a multiple of {ways * piece}"},
            hint="choose a smaller `piece`, or pad the sequences",
        )
    order, rows = torch.stack([_order(row, ways, piece) for row in numbers]), torch.arange(samples)
    fields = {**batch, PLACES: torch.arange(length).expand(samples, length)}
    return {
        name: field[rows.unsqueeze(1), order] if field.shape[:2] == numbers.shape else field
        for name, field in fields.items()
    }


def _order(numbers: Tensor, ways: int, piece: int) -> Tensor:
    """Return the places of the tokens of one sequence, those of the first device first."""
    work = keys_seen(numbers).view(-1, piece).sum(1).tolist()
    owned: list[list[int]] = [[] for _ in range(ways)]
    sums = [0] * ways
    for number in sorted(range(len(work)), key=lambda number: -work[number]):
        free = [device for device in range(ways) if len(owned[device]) < len(work) // ways]
        device = min(free, key=sums.__getitem__)  # the piece with most work goes to the device with least
        owned[device].append(number)
        sums[device] += work[number]
    pieces = torch.tensor([number for each in owned for number in sorted(each)])
    return (pieces.unsqueeze(1) * piece + torch.arange(piece)).flatten()


def keys_seen(numbers: Tensor) -> Tensor:
    """Return how many tokens of its document each token sees: itself and those before it."""
    order = numbers.argsort(stable=True)
    _, counts = numbers[order].unique_consecutive(return_counts=True)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) - starts + 1)
