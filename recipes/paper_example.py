"""A strategy in the published JSON form: two stages of experts, with an overlapped forward and backward."""

from collections.abc import Iterator
from pathlib import Path

import torch

import piper
from piper.models import moe

CONFIG = moe.Config.tiny(layers=4, stages=2)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(CONFIG.vocab, (8, 17), generator=generator)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def example() -> piper.Job:
    return piper.Job(
        model=lambda: moe.MoEDecoder(CONFIG),
        loss=moe.token_loss,
        data=batches,
        strategy=Path(__file__).with_suffix(".json"),
    )
