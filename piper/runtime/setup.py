"""What a worker is given to run one device's plan."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piper.ir.chunk import Outline
from piper.plan.plan import Plans

Code = Callable[..., tuple[Tensor, ...]]
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A compiled job as workers need it: the plans, the code they call, and how parameters begin and change."""

    plans: Plans
    outline: Outline
    code: Callable[[str, str], Code]  # (chunk, phase)
    constants: Mapping[str, Tensor]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    precision: str = "fp32"
    clip_norm: float | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type that computes."""
        return DTYPES[self.precision]
