"""A small dense decoder on bytes: on one device, replicated, with ZeRO, and as a pipeline."""

from dataclasses import replace
from pathlib import Path

import torch

import piper
from piper.data import TextFile
from piper.models import decoder

TEXT = Path(__file__).with_name("data") / "text.txt"
CONFIG = decoder.Config(vocab=256, dim=64, layers=4, heads=4, kv_heads=2, head_dim=16, hidden=192, stages=2)


def single() -> piper.Job:
    """One device."""
    return piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.token_loss,
        data=lambda: TextFile(TEXT, length=32, batch=16),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        clip_norm=1.0,
        steps=200,
    )


def dp() -> piper.Job:
    """The same model on two devices, each with half of every batch."""
    return replace(single(), strategy=[piper.replicate(piper.at(), [0, 1])])


def zero() -> piper.Job:
    """Parameters, gradients and optimizer state divided between the two."""
    return replace(single(), strategy=[piper.replicate(piper.at(), [0, 1], zero=3)])


def pp() -> piper.Job:
    """Two stages on two devices, four parts of each batch, one forward then one backward."""
    places = [piper.place(piper.at(PP=stage), [stage]) for stage in range(2)]
    parts = [piper.split(piper.at(), axis="MB", parts=4), *piper.schedules.one_f_one_b(2, 4)]
    return replace(single(), strategy=[*places, *parts])
