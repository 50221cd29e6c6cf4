"""Random text for the recipes of this folder: they show strategies, not data."""

import torch


def text(samples: int, length: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Return two batches of the same words at every call."""
    draw = torch.Generator().manual_seed(0)
    words = (torch.randint(vocab, (samples, length), generator=draw) for _ in range(2))
    return [{"input_ids": tokens, "labels": tokens} for tokens in words]
