"""Tensor and sequence parallelism whose collectives hide: two microbatches run against each other."""

from dataclasses import replace

from dense import CONFIG, single
from tensor import WEIGHTS

import piper


def hidden() -> piper.Job:
    """Every layer over two devices; each collective of one microbatch behind the compute of the other."""
    pair = piper.strategies.tensor(layers=CONFIG.layers, tp=2, weights=WEIGHTS, overlap=True)
    return replace(single(), strategy=pair)
