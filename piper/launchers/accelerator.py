"""Which accelerator of its machine a worker uses, and what it can communicate over."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

from piper.plan.plan import Plans
from piper.runtime.comm.base import Comms
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.nccl import NcclComms
from piper.runtime.comm.staged import StagedComms

VISIBLE = "CUDA_VISIBLE_DEVICES"


def crowded(workers: int) -> bool:
    """Whether workers of this machine have to share its accelerators."""
    return workers > torch.cuda.device_count()


def take_one(local: int) -> None:
    """Let this process see one accelerator alone, as the first: the one that captured code names.

    It must not have looked for accelerators yet. Those that others made visible to it are counted on.
    """
    given = os.environ.get(VISIBLE)
    there = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]
    os.environ[VISIBLE] = there[local % len(there)]


def ending(comms: Comms) -> Callable[[], None]:
    """What ends all that is under way on a worker's communicators, so that nobody waits for it."""
    return comms.abort if isinstance(comms, NcclComms) else lambda: None


def comms_of(
    plans: Plans,
    device: int,
    accelerator: torch.device,
    store: Store,
    address: str,
    timeout: float,
    *,
    patience: timedelta,
    shares: bool,
) -> Comms:
    """What a worker communicates over: NCCL between accelerators, gloo on hosts or where one is shared."""
    if accelerator.type == "cuda" and not shares:
        return NcclComms(plans, device, store, accelerator, timeout)
    gloo = GlooComms(plans, device, store, address, timeout, patience=patience)
    return StagedComms(gloo, accelerator) if accelerator.type == "cuda" else gloo
