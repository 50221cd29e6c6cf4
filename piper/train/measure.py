"""What a step of training tells, and how the learning rate goes on."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.job import Job

SIDE = 2  # of the parameter that is trained with nothing; some optimizers take matrices only
TOKENS = ("tokens", "input_ids")  # the fields that are counted, where a batch has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One step, as `metrics.jsonl` has it. Steps count from 1: step k is the k-th update."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float  # samples, where the batch has no tokens
    step_s: float


class Rate:
    """The learning rate of each step, from an optimizer like the workers' that has nothing to train."""

    def __init__(self, job: Job, done: int) -> None:
        """`done`: steps that have been taken before."""
        self._optimizer = job.optimizer([torch.zeros(SIDE, SIDE, requires_grad=True)])
        self._scheduler = None if job.scheduler is None else job.scheduler(self._optimizer)
        for _ in range(done):
            self.advance()

    @property
    def now(self) -> float:
        """The rate of the next step, of the first group of parameters."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Go on by a step."""
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()


def unit_of(fields: Collection[str]) -> str:
    """What is counted in batches of these fields."""
    return "tokens" if any(name in fields for name in TOKENS) else "samples"


def counted(batch: Mapping[str, Tensor]) -> int:
    """The tokens of a batch, or its samples."""
    for name in TOKENS:
        if name in batch:
            return batch[name].numel()
    return len(next(iter(batch.values())))
