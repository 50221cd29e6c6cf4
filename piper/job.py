"""A job: what to train, on what data, how, and with which strategy. A recipe returns one."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Union, get_args

from piper.callbacks import Callback
from piper.directives import Directive
from piper.directives.base import known_directives
from piper.directives.by_length import ByLength, by_length
from piper.directives.json import load_strategy
from piper.errors import ConfigError, PiperError
from piper.ir.devices import show
from piper.ir.dtypes import DTYPES, JobPrecision
from piper.ir.numbers import is_number, is_whole
from piper.process.usercode import calling_line, said

if TYPE_CHECKING:  # a recipe pays for torch when its model does, not when it imports us
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch = Mapping[str, "Tensor"]
Mean = Union["Tensor", "tuple[Tensor, Tensor]"]  # a mean, or a sum and its weight
Metrics = Mapping[str, "tuple[Tensor, Tensor | float]"]  # the sum and the weight of each
Loss = Callable[["nn.Module", Batch], Mean | tuple[Mean, Metrics]]
Strategy = Sequence[Directive]
InitialDraws = Literal["device", "host"]
SEEDS = 2**63  # what every generator takes


def adamw(params: "Iterable[Tensor]") -> "Optimizer":
    """Return the default optimizer of a job: AdamW with a learning rate of 1e-3."""
    import torch

    return torch.optim.AdamW(params, lr=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The folder of checkpoints, how often they are written, and how many are kept."""

    folder: Path | str
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        by, folder = "Checkpoint", f"folder is {type(self.folder).__name__}, not a path"
        need(isinstance(self.folder, Path | str), folder, 'name one: folder="checkpoints"', by)
        need(is_whole(self.every, 1), f"every={self.every!r}", "save every so many steps, at least 1", by)
        need(is_whole(self.keep, 1), f"keep={self.keep!r}", "keep at least the last checkpoint", by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """The data that a job is evaluated on, how often, and what is measured.

    metrics: the function that evaluation runs in place of the job's loss. Like a loss it gets the model and a
    batch, and returns a loss, or a loss with metrics to be summed. None: the job's loss.
    """

    data: Callable[[], Iterable[Batch]]
    every: int = 100
    metrics: "Loss | None" = None

    def __post_init__(self) -> None:
        by, data = "Evaluate", f"data is {type(self.data).__name__}, which cannot be called"
        need(callable(self.data), data, "give a function that returns the batches to evaluate on", by)
        need(is_whole(self.every, 1), f"every={self.every!r}", "evaluate every so many steps, at least 1", by)
        metrics = f"metrics is {type(self.metrics).__name__}, which cannot be called"
        hint = "give a function of (model, batch) that returns what a loss returns"
        need(self.metrics is None or callable(self.metrics), metrics, hint, by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The lengths that batches are padded to, so that few programs are compiled.

    lengths: sizes of axis 1. A program for each is compiled and proven before the first step.
    pad: the fields that are padded, each with the value that is added at the end of axis 1. A batch is padded
    to the shortest of the lengths that it fits in; one that is longer than all of them stays as it is.
    """

    lengths: Sequence[int]
    pad: Mapping[str, float]

    def __post_init__(self) -> None:
        by, lengths = "Buckets", self.lengths if isinstance(self.lengths, Sequence) else ()
        holds = len(lengths) > 0 and all(is_whole(length, 1) for length in lengths)
        hint = "give at least one length, each a whole number: lengths=[128, 256, 512]"
        need(holds, f"lengths={self.lengths!r}", hint, by)
        pad = self.pad if isinstance(self.pad, Mapping) else {}
        holds = len(pad) > 0 and all(isinstance(value, int | float) for value in pad.values())
        hint = 'name the fields to pad, each with a number: pad={"tokens": 0, "labels": -100}'
        need(holds, f"pad={self.pad!r}", hint, by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. It checks its fields; nothing runs until it is compiled and launched."""

    model: "Callable[[], nn.Module]"
    loss: "Loss"
    data: Callable[[], Iterable[Batch]]
    strategy: Strategy | Mapping[int, Strategy] | Path | str | Callable[[Sequence[int]], Strategy] = ()
    optimizer: "Callable[[Iterable[Tensor]], Optimizer]" = adamw
    scheduler: "Callable[[Optimizer], LRScheduler] | None" = None
    precision: JobPrecision = "fp32"
    clip_norm: float | None = None
    steps: int = 100
    seed: int = 0
    checkpoint: Checkpoint | None = None
    evaluate: Evaluate | None = None
    callbacks: Sequence[Callback] = ()
    buckets: Buckets | None = None
    elastic: tuple[int, int] | None = None  # the fewest and the most devices of a strategy that is a function
    initial: InitialDraws = "device"  # where the random numbers of initial values are drawn

    def __post_init__(self) -> None:
        check_functions(self)
        check_settings(self)
        check_parts(self)
        for callback in self.callbacks:
            object.__setattr__(self, "optimizer", callback.wrap_optimizer(self.optimizer))
        check_elastic(self.strategy, self.elastic)
        if isinstance(self.strategy, Mapping):
            check_lengths(self.strategy)
            object.__setattr__(self, "strategy", by_length(self.strategy))
        elif not isinstance(self.strategy, Path | str) and not callable(self.strategy):
            check_strategy(self.strategy)


def check_functions(job: Job) -> None:
    """Refuse functions of a job that cannot be called as it calls them, and a model that is built already."""
    for name, hint in CALLABLES.items():
        what = f"{name} is {type(getattr(job, name)).__name__}, which cannot be called"
        need(callable(getattr(job, name)), what, hint)
    torch = sys.modules.get("torch")  # there is no module before torch is imported
    built = torch is not None and isinstance(job.model, torch.nn.Module)
    what = f"model is a {type(job.model).__name__} that is built already"
    need(not built, what, CALLABLES["model"])
    name = getattr(job.loss, "__name__", type(job.loss).__name__)
    need(not of_torch(job.loss), f"loss is torch's {name}: it takes no model and no batch", A_LOSS)
    hint = "give a function: scheduler=lambda optimizer: StepLR(optimizer, 10)"
    need(job.scheduler is None or callable(job.scheduler), "scheduler cannot be called", hint)


def check_settings(job: Job) -> None:
    """Refuse numbers and names of a job that are not among those allowed."""
    precisions = "precision is one of " + ", ".join(DTYPES)
    need(job.precision in DTYPES, f"there is no precision {job.precision!r}", precisions)
    clips = job.clip_norm is None or (is_number(job.clip_norm) and job.clip_norm > 0)
    need(clips, f"clip_norm={job.clip_norm!r}", "clip to a positive norm, or leave it out")
    need(is_whole(job.steps, 1), f"steps={job.steps!r}", "train at least 1 step, a whole number")
    seed = f"seed={job.seed!r}"
    need(is_whole(job.seed, 0) and job.seed < SEEDS, seed, "choose a whole number from 0")
    hint = "initial values are drawn on the device that the job runs on, or on the host: one of "
    known = get_args(InitialDraws)
    need(job.initial in known, f"initial={job.initial!r}", hint + ", ".join(known))


def check_parts(job: Job) -> None:
    """Refuse parts of a job that are of another class: its checkpoint, evaluation, buckets and callbacks."""
    what = f"checkpoint is {type(job.checkpoint).__name__}, not a Checkpoint"
    hint = 'give a piper.Checkpoint(folder="checkpoints"), or leave it out'
    need(job.checkpoint is None or isinstance(job.checkpoint, Checkpoint), what, hint)
    what = f"evaluate is {type(job.evaluate).__name__}, not an Evaluate"
    hint = "give a piper.Evaluate(data=..., every=...), or leave it out"
    need(job.evaluate is None or isinstance(job.evaluate, Evaluate), what, hint)
    what = f"buckets is {type(job.buckets).__name__}, not a Buckets"
    hint = 'give a piper.Buckets(lengths=[128, 256], pad={"tokens": 0, "labels": -100}), or leave it out'
    need(job.buckets is None or isinstance(job.buckets, Buckets), what, hint)
    example = "callbacks=[piper.callbacks.EarlyStopping()]"
    what = f"callbacks is {type(job.callbacks).__name__}, not a list"
    need(isinstance(job.callbacks, Sequence), what, f"put callbacks in a list: {example}")
    for number, callback in enumerate(job.callbacks):
        what = f"callbacks[{number}] is {type(callback).__name__}, not a callback"
        need(isinstance(callback, Callback), what, f"give instances of piper.callbacks.Callback: {example}")


def check_elastic(strategy: object, elastic: object) -> None:
    """Refuse a malformed range of devices, or one that does not fit the kind of the strategy."""
    match elastic:
        case None:
            asks = "strategy is a function of the devices, and elastic does not say how many there are"
            need(not callable(strategy), asks, "give the fewest and the most: elastic=(2, 4)")
        case (int(low), high) if is_whole(low, 1) and is_whole(high, low):
            fixed = f"elastic={elastic!r}, and the strategy is {type(strategy).__name__}, for fixed devices"
            hint = "give a function: strategy=lambda devices: [piper.replicate(piper.at(), devices)]"
            need(callable(strategy), fixed, hint)
        case _:
            hint = "give the fewest and the most devices, from 1: elastic=(2, 4)"
            need(False, f"elastic={elastic!r}", hint)


def strategy_of(job: Job) -> list[Directive]:
    """Return a job's directives, read from its file where it names one; if elastic, for all devices."""
    if isinstance(job.strategy, Path | str):
        return list(load_strategy(Path(job.strategy)))
    if job.elastic is not None:
        return list(directives_for(job, job.elastic[1]))
    assert not callable(job.strategy), "a function comes with `elastic`"
    assert not isinstance(job.strategy, Mapping), "a job makes a ByLength of it"
    return list(job.strategy)


def job_for(job: Job, batch: Batch) -> Job:
    """Return a job with the strategy chosen that batches like `batch` take, where that depends on them."""
    strategy = job.strategy
    if isinstance(strategy, Path | str):
        strategy = load_strategy(Path(strategy))
    if not isinstance(strategy, ByLength):
        return job
    chosen = replace(strategy, limit=strategy.limit_for(length_of(batch)))
    return job if chosen == job.strategy else replace(job, strategy=chosen)


def limit_of(job: Job, batch: Batch | None = None) -> int | None:
    """Return the length up to which a job's strategy serves, or the one for a batch. None: all lengths."""
    if not isinstance(job.strategy, ByLength):
        return None
    return job.strategy.limit if batch is None else job.strategy.limit_for(length_of(batch))


def length_of(batch: Batch) -> int:
    """Return the length of a batch: the largest size of axis 1 among its fields. 1: they have one axis."""
    return max((field.shape[1] for field in batch.values() if field.dim() > 1), default=1)


def directives_for(job: Job, size: int) -> Strategy:
    """Return the strategy of an elastic job for `size` devices, 0 to size - 1."""
    assert job.elastic is not None and callable(job.strategy), "the job is elastic"
    devices = tuple(range(size))
    by = f"strategy({list(devices)})"
    try:
        strategy = job.strategy(devices)
    except PiperError:
        raise
    except Exception as error:
        hint = "return directives for every number of devices from the fewest to the most"
        raise ConfigError(f"the strategy failed: {said(error)}", by=by, hint=hint) from error
    what = "the strategy depends on the devices and on the length of the batch"
    hint = "return one list of directives for all lengths, or leave elastic= out"
    need(not isinstance(strategy, Mapping), what, hint, by)
    check_strategy(strategy)
    hint = f"use the devices that the function is given: {show(devices)}"
    for number, directive in enumerate(strategy):
        named = getattr(directive, "devices", ())
        what = f"strategy[{number}] is over devices {show(tuple(sorted(named)))}"
        need(set(named) <= set(devices), what, hint, by)
    return strategy


def check_lengths(strategies: Mapping[int, Strategy]) -> None:
    """Refuse strategies by length without a length, with one that is no whole number, or a bad strategy."""
    lengths = ", ".join(map(repr, strategies)) or "none"
    what = f"the lengths of the strategies are {lengths}"
    hint = "give each strategy the longest batch that it is for, a whole number: {4096: short, 65536: long}"
    need(bool(strategies) and all(is_whole(length, 1) for length in strategies), what, hint)
    for strategy in strategies.values():
        check_strategy(strategy)


def check_strategy(strategy: object) -> None:
    """Refuse a strategy that is not a flat sequence of directives."""
    what = f"strategy is {type(strategy).__name__}, not a list of directives"
    need(isinstance(strategy, Sequence), what, "put directives in a list, or give the path of a JSON file")
    assert isinstance(strategy, Sequence)
    known = ", ".join(known_directives())
    hint = f"a strategy is a flat list of {known}; add a schedule with +, not inside the list"
    for number, directive in enumerate(strategy):
        what = f"strategy[{number}] is {type(directive).__name__}, not a directive"
        need(isinstance(directive, Directive), what, hint)


CALLABLES = {
    "model": "give a function that builds the model: model=MyModel or model=lambda: MyModel(8)",
    "loss": "give a function of (model, batch) that returns the loss",
    "data": "give a function that returns the batches: data=lambda: loader",
    "optimizer": "give a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)",
}
A_LOSS = 'give a function that calls it: loss=lambda model, batch: criterion(model(batch["x"]), batch["y"])'


def of_torch(value: object) -> bool:
    """Return whether a value is one of torch's own losses, such as `nn.MSELoss()` or `F.mse_loss`."""
    return str(getattr(value, "__module__", "")).startswith(("torch.nn.modules", "torch.nn.functional"))


def need(holds: bool, what: str, hint: str, by: str = "Job") -> None:
    """Refuse a value of the job unless `holds`, and name the user's line."""
    if not holds:
        line = calling_line()
        raise ConfigError(what, by=f"{by} ({line})" if line else by, hint=hint)
