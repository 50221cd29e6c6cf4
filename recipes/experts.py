"""A small mixture of experts whose experts are divided over two devices, which share the rest."""

from pathlib import Path

import torch

import piper
from piper.data import TextFile
from piper.models import moe

TEXT = Path(__file__).with_name("data") / "text.txt"
CONFIG = moe.Config(vocab=256, dim=64, layers=2, heads=4, head_dim=16, experts=8, top_k=2, hidden=64)


def ep() -> piper.Job:
    """Rows travel to their experts and back; everything else is replicated."""
    return piper.Job(
        model=lambda: moe.MoEDecoder(CONFIG),
        loss=moe.token_loss,
        data=lambda: TextFile(TEXT, length=64, batch=16),
        strategy=[piper.replicate(piper.at(), [0, 1]), piper.shard(piper.at(EP="*"), [0, 1])],
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
        steps=200,
    )
