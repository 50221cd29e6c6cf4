"""Tensor, sequence and context parallelism of the dense decoder: its work divided over groups of devices."""

from dataclasses import replace

from dense import TEXT, single

import piper
from piper import at
from piper.data import TextFile

WEIGHTS = {  # which dimension of a weight is divided: 0 its outputs, 1 its inputs
    "*attention.q|*attention.k|*attention.v|*ffn.gate|*ffn.up|embedding|head": 0,
    "*attention.out|*ffn.down": 1,
}
FIELDS = {"tokens": 1, "labels": 1}  # the sequence of each field is dimension 1


def tp_dp() -> piper.Job:
    """Every layer divided over two devices; two such pairs, ZeRO-3 across them."""
    pairs = piper.shard(at(), range(4), ways=2, axis="TP", weights=WEIGHTS)
    return replace(single(), strategy=[piper.replicate(at(), range(4), zero=3), pairs])


def sequence() -> piper.Job:
    """Every layer over two devices, and the activations between layers along the sequence."""
    return replace(single(), strategy=[piper.shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=1)])


def context() -> piper.Job:
    """A long sequence over two devices, each with an early and a late quarter; keys and values go round."""
    halves = piper.shard(at(), [0, 1], axis="CP", batch=FIELDS, attention="ring", balance="zigzag")
    return replace(single(), data=lambda: TextFile(TEXT, length=512, batch=2), strategy=[halves])


def four_dimensions() -> piper.Job:
    """Two stages of four devices: pairs divide weights and activations, and the two pairs the sequence."""
    stages: list[piper.Directive] = []
    for stage, devices in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        stages.append(piper.shard(at(PP=stage), devices, ways=2, axis="TP", weights=WEIGHTS, between=1))
        stages.append(piper.shard(at(PP=stage), devices, ways=2, axis="CP", batch=FIELDS))
    stages += [piper.split(at(), parts=4), *piper.schedules.one_f_one_b(2, 4)]
    return replace(single(), strategy=stages)
