"""Tensor, sequence and context parallelism: regions whose work is divided over groups of devices."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW

import piper
from piper.models import decoder

CONFIG = decoder.Config(vocab=512, dim=64, layers=4, heads=4, kv_heads=2, head_dim=16, hidden=192, stages=2)
WEIGHTS = {  # which dimension of a weight is divided: 0 its outputs, 1 its inputs
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}
FIELDS = {"tokens": 1, "labels": 1}  # the sequence of each field is dimension 1
SAMPLES, LENGTH, LONG = 8, 32, 512


def data(samples: int = SAMPLES, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Return batches in which each token says what the next one is."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(CONFIG.vocab, (4, samples, 1), generator=generator)
    text = (first + 7 * torch.arange(length + 1)) % CONFIG.vocab
    return [{"tokens": batch[:, :-1], "labels": batch[:, 1:]} for batch in text]


def job(strategy: Sequence[piper.Directive], samples: int = SAMPLES, length: int = LENGTH) -> piper.Job:
    return piper.Job(
        model=partial(decoder.Decoder, CONFIG),
        loss=decoder.token_loss,
        data=partial(data, samples, length),
        strategy=strategy,
        optimizer=partial(AdamW, lr=1e-3),
        clip_norm=1.0,
        steps=4,
    )


def tp_dp() -> piper.Job:
    """Divide every layer over two devices, and train two such pairs on half of the samples each (ZeRO-3)."""
    devices = [0, 1, 2, 3]
    return job(
        [
            piper.replicate(piper.at(), devices, zero=3),
            piper.shard(piper.at(), devices, ways=2, axis="TP", weights=WEIGHTS),
        ]
    )


def sequence() -> piper.Job:
    """Divide every layer over two devices, and the activations between layers along the sequence."""
    return job([piper.shard(piper.at(), [0, 1], axis="TP", weights=WEIGHTS, between=1)])


def context() -> piper.Job:
    """Divide a long sequence over two devices; each gets an early and a late quarter."""
    return job(
        [piper.shard(piper.at(), [0, 1], axis="CP", batch=FIELDS, balance="zigzag")], samples=2, length=LONG
    )


def four_dimensions() -> piper.Job:
    """Train two pipeline stages of four devices each: two divide the weights, two the sequence.

    Microbatches follow 1F1B. With more devices, `replicate` adds data parallelism as the fourth dimension.
    """
    stages = [[0, 1, 2, 3], [4, 5, 6, 7]]
    return job(
        [
            directive
            for stage, devices in enumerate(stages)
            for directive in (
                piper.shard(piper.at(PP=stage), devices, ways=2, axis="TP", weights=WEIGHTS, between=1),
                piper.shard(piper.at(PP=stage), devices, ways=2, axis="CP", batch=FIELDS, balance="zigzag"),
            )
        ]
        + [
            piper.split(piper.at(), axis="MB", parts=4),
            *piper.schedules.one_f_one_b(stages=2, microbatches=4),
        ]
    )
