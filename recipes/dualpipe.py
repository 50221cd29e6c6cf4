"""A small mixture of experts under DualPipe in both directions, with EP and ZeRO-1, on four devices."""

from pathlib import Path

import torch

import piper
from piper import at
from piper.data import TextFile
from piper.models import moe

RANKS, REPLICAS, MICROBATCHES = 2, 2, 4
CONFIG = moe.Config(
    vocab=256, dim=64, layers=2, heads=4, head_dim=16, experts=8, top_k=2, hidden=64, stages=RANKS
)
TEXT = Path(__file__).with_name("data") / "text.txt"


def strategy() -> list[piper.Directive]:
    """Half of the microbatches go down the ranks, half up: stage s lives on ranks s and RANKS - 1 - s."""
    half = MICROBATCHES // 2
    directives: list[piper.Directive] = [piper.split(at(), axis="MB", parts=MICROBATCHES)]
    for stage in range(RANKS):
        for rank, parts in ((stage, range(half)), (RANKS - 1 - stage, range(half, MICROBATCHES))):
            devices = range(rank * REPLICAS, (rank + 1) * REPLICAS)
            directives.append(piper.replicate(at(PP=stage, MB=parts), devices, zero=1))
            directives.append(piper.shard(at(PP=stage, MB=parts, EP="*"), devices))
    return directives + piper.schedules.dualpipe(RANKS, MICROBATCHES)


def both_ways() -> piper.Job:
    return piper.Job(
        model=lambda: moe.MoEDecoder(CONFIG),
        loss=moe.token_loss,
        data=lambda: TextFile(TEXT, length=64, batch=16),
        strategy=strategy(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
    )
