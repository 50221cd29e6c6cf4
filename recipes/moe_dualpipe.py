"""A small mixture of experts under PP x DP x EP x ZeRO with the DualPipe-V schedule, on four devices."""

from pathlib import Path

import torch

import piper
from piper.data import TextFile
from piper.models import moe

RANKS, REPLICAS, MICROBATCHES = 2, 2, 4
CONFIG = moe.Config(
    vocab=256, dim=64, layers=4, heads=4, head_dim=16, experts=8, top_k=2, hidden=64, stages=2 * RANKS
)
TEXT = Path(__file__).with_name("data") / "text.txt"


def strategy() -> list[piper.Directive]:
    """Stages 0 and 3 share a rank, and so do 1 and 2: a V. A rank is two devices that divide its experts."""
    directives: list[piper.Directive] = []
    for stage in range(2 * RANKS):
        rank = min(stage, 2 * RANKS - 1 - stage)
        devices = range(rank * REPLICAS, (rank + 1) * REPLICAS)
        directives.append(piper.replicate(piper.at(PP=stage), devices, zero=3))
        directives.append(piper.shard(piper.at(PP=stage, EP="*"), devices))
    directives.append(piper.split(piper.at(), axis="MB", parts=MICROBATCHES))
    return directives + piper.schedules.dualpipe_v(RANKS, MICROBATCHES)


def demo() -> piper.Job:
    return piper.Job(
        model=lambda: moe.MoEDecoder(CONFIG),
        loss=moe.token_loss,
        data=lambda: TextFile(TEXT, length=64, batch=16),
        strategy=strategy(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
        steps=120,
        checkpoint=piper.Checkpoint(folder="checkpoints", every=40),
    )
