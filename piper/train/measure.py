"""The measures of a training step, and the learning rate of the next."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from piper.checkpoint.json_state import decode
from piper.checkpoint.metadata import Trainer
from piper.job import Job
from piper.plan.plan import Bucket
from piper.runtime.standins import Sizes
from piper.runtime.trainers import advance, empty_optimizer, make_scheduler

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


Reporter = Callable[[Measure], None]


class Rate:
    """The learning rate of each step, from an optimizer like the workers' that has nothing to train."""

    def __init__(
        self,
        job: Job,
        buckets: Iterable[Bucket],
        resumed: Trainer | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """Build the schedule. resumed: the state of a checkpoint to continue from. None: a new run.

        sizes: of all parameters that plain PyTorch gives to the optimizer. None: of those in the buckets.
        """
        self._job = job
        self._optimizer = empty_optimizer(job.optimizer, buckets, sizes)
        self._scheduler = None
        if self._optimizer is None:
            return
        if job.scheduler is not None:
            self._scheduler = make_scheduler(job.scheduler, self._optimizer)
        if resumed is not None and resumed.optimizer is not None:
            groups = cast("list[dict[str, object]]", decode(resumed.groups))
            for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
                group.update(saved)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(cast("dict[str, object]", decode(resumed.schedule)))

    @property
    def now(self) -> float:
        """Return the learning rate of the next step, of the first group of parameters."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    def advance(self, step: int) -> None:
        """Go on by a step, as workers do at its end."""
        if self._scheduler is not None and self._job.scheduler is not None:
            advance(self._scheduler, self._job.scheduler, step)


def unit_of(fields: Collection[str]) -> str:
    """Return the unit that is counted in batches of these fields."""
    return "tokens" if any(name in fields for name in TOKENS) else "samples"


def counted(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens of a batch, or its samples."""
    for name in TOKENS:
        if name in batch:
            return batch[name].numel()
    return len(next(iter(batch.values())))
