"""A job: what to train, on what data, how, and with which strategy. A recipe returns one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from piper.directives import Directive
from piper.directives.base import known_directives
from piper.errors import ConfigError

if TYPE_CHECKING:  # a recipe pays for torch when its model does, not when it imports us
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch = Mapping[str, "Tensor"]
Precision = Literal["fp32", "bf16", "fp64"]


def adamw(params: "Iterable[Tensor]") -> "Optimizer":
    """The optimizer of a job that names none: AdamW with a learning rate of 1e-3."""
    import torch

    return torch.optim.AdamW(params, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where checkpoints go, how often, and how many are kept."""

    folder: Path | str
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        need(self.every >= 1, "Checkpoint", f"every={self.every!r}", "save every so many steps, at least 1")
        need(self.keep >= 1, "Checkpoint", f"keep={self.keep!r}", "keep at least the last checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train and how. It checks itself; nothing runs until it is compiled and launched."""

    model: "Callable[[], nn.Module]"
    loss: "Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]]"
    data: Callable[[], Iterable[Batch]]
    strategy: Sequence[Directive] | Path | str = ()
    optimizer: "Callable[[Iterable[Tensor]], Optimizer]" = adamw
    scheduler: "Callable[[Optimizer], LRScheduler] | None" = None
    precision: Precision = "fp32"
    clip_norm: float | None = None
    steps: int = 100
    seed: int = 0
    checkpoint: Checkpoint | None = None

    def __post_init__(self) -> None:
        for name in ("model", "loss", "data", "optimizer"):
            what = f"{name} is {type(getattr(self, name)).__name__}, which cannot be called"
            need(callable(getattr(self, name)), "Job", what, CALLABLES[name])
        need(
            self.scheduler is None or callable(self.scheduler),
            "Job",
            "scheduler cannot be called",
            "give a function",
        )
        need(
            self.precision in get_args(Precision),
            "Job",
            f"there is no precision {self.precision!r}",
            "precision is one of " + ", ".join(get_args(Precision)),
        )
        clip = self.clip_norm
        need(
            clip is None or clip > 0, "Job", f"clip_norm={clip!r}", "clip to a positive norm, or leave it out"
        )
        need(
            isinstance(self.steps, int) and self.steps >= 1,
            "Job",
            f"steps={self.steps!r}",
            "train at least 1 step",
        )
        if not isinstance(self.strategy, Path | str):
            for number, directive in enumerate(self.strategy):
                need(
                    isinstance(directive, Directive),
                    "Job",
                    f"strategy[{number}] is {type(directive).__name__}, not a directive",
                    f"a strategy is a flat list of {', '.join(known_directives())}; "
                    "add a schedule with +, not inside the list",
                )


CALLABLES = {
    "model": "give a function that builds the model: model=MyModel or model=lambda: MyModel(8)",
    "loss": "give a function of (model, batch) that returns the loss",
    "data": "give a function that returns the batches: data=lambda: loader",
    "optimizer": "give a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
}


def need(holds: bool, by: str, what: str, hint: str) -> None:
    """Refuse a value, unless it holds."""
    if not holds:
        raise ConfigError(what, by=by, hint=hint)
