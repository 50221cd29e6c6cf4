"""A small mixture of experts under PP x DP x EP x ZeRO with the DualPipe-V schedule, on four devices."""

from collections.abc import Iterator

import torch

import piper
from piper.models import moe

RANKS, REPLICAS, MICROBATCHES = 2, 2, 4
CONFIG = moe.Config.tiny(layers=4, stages=2 * RANKS)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Random tokens, each labelled with the next one."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(CONFIG.vocab, (16, 17), generator=generator)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def strategy() -> list[piper.Directive]:
    """Stages 0 and 3 share a rank, and so do 1 and 2: a V. A rank is two devices that divide its experts."""
    directives: list[piper.Directive] = []
    for stage in range(2 * RANKS):
        rank = min(stage, 2 * RANKS - 1 - stage)
        devices = range(rank * REPLICAS, (rank + 1) * REPLICAS)
        directives += [
            piper.replicate(piper.at(PP=stage), devices, zero=3),
            piper.shard(piper.at(PP=stage, EP="*"), devices),
        ]
    directives.append(piper.split(piper.at(), axis="MB", parts=MICROBATCHES))
    return directives + piper.schedules.dualpipe_v(RANKS, MICROBATCHES)


def demo() -> piper.Job:
    return piper.Job(
        model=lambda: moe.MoEDecoder(CONFIG),
        loss=moe.loss,
        data=batches,
        strategy=strategy(),
        clip_norm=1.0,
        steps=20,
    )
