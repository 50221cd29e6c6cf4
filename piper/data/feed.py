"""A job's batches in the order of its steps, from any step on and from any kind of data."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import GeneratorType
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from piper.data.batches import Batches
from piper.errors import ConfigError, PiperError
from piper.process.usercode import defined_at, named, raised, users_frames

Given = Mapping[str, Tensor]
Make = Callable[[], Iterable[Given]]


@contextmanager
def naming(make: Make, at: str) -> Iterator[None]:
    """Turn what the user's data raises inside into one message. at: says where in the data."""
    try:
        yield
    except PiperError as error:
        # One of our own data classes: name the user's line that made or called it.
        frames = users_frames(error)
        where = frames[-1][0].partition(" in ")[0] if frames else defined_at(make)
        raise (error.located(f"{error.by} ({where})") if where else error) from error.__cause__
    except Exception as error:
        hint = "fix the data at that line"
        raise raised("data() failed", error, role="data", thing=make, facts={"at": at}, hint=hint) from error


def call_data(make: Make) -> Iterable[Given]:
    """Call the user's `data`, and return the batches it gives."""
    with naming(make, "the call of data()"):
        data = make()
    if isinstance(data, Mapping | Tensor | str):
        raise ConfigError(
            f"data() returned one {type(data).__name__}, not batches",
            by=named("data", make),
            hint="return the batches: data=lambda: [batch], a generator or a DataLoader of dicts of tensors",
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"data() returned {type(data).__name__}, which cannot be iterated",
            by=named("data", make),
            hint="return the batches: a list, a generator or a DataLoader of dicts of tensors",
        )
    return data


def begin(data: Iterable[Given], make: Make) -> Iterator[Given]:
    """Return an iterator over the batches."""
    with naming(make, "the beginning of an epoch"):
        return iter(data)


def take(batches: Iterator[Given], step: int, make: Make) -> Given | None:
    """Return the next batch, which is for step `step`, counted from 1. None: there are no more."""
    with naming(make, f"the batch of step {step}"):
        batch = next(batches, None)
    if batch is not None:
        check_fields(batch, named("data", make), f"the batch of step {step}")
    return batch


def reads_the_same(one: object, other: object) -> bool:
    """Return whether two iterators are one, or read one: by `map`, `itertools`, generator expressions."""
    return not _sources(one).isdisjoint(_sources(other))


def _sources(data: object) -> set[int]:
    """Return the identities of an iterator and of those that it reads."""
    identities, waiting = set[int](), [data]
    while waiting:
        iterator = waiting.pop()
        if isinstance(iterator, tuple):  # in which `map` and `zip` hold what they read
            waiting += iterator
        if not isinstance(iterator, Iterator) or id(iterator) in identities:
            continue
        identities.add(id(iterator))
        if isinstance(iterator, GeneratorType):  # of a generator function nothing is known before it runs
            waiting += [iterator.gi_frame.f_locals.get(".0")] if iterator.gi_frame else []
        elif type(iterator).__module__ in ("builtins", "itertools"):
            waiting += gc.get_referents(iterator)
    return identities


def check_fields(batch: object, by: str, at: str | None = None) -> None:
    """Refuse a batch that is not a dict of tensors with the same number of samples each. at: which it is."""
    place = {} if at is None else {"at": at}
    fields = batch if isinstance(batch, Mapping) else {}
    if not fields or not all(isinstance(v, Tensor) and v.dim() for v in fields.values()):
        raise ConfigError(
            "a batch is not a dict of tensors",
            by=by,
            facts={**place, "got": describe(fields) if fields else type(batch).__name__},
            hint='yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; '
            "leave texts and lists out",
        )
    sizes = {str(name): len(value) for name, value in fields.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "the fields of a batch disagree on the number of samples",
            by=by,
            facts={**place, **{name: f"{size} samples" for name, size in sizes.items()}},
            hint="the first axis of every field is the samples",
        )
    if not all(sizes.values()):
        raise ConfigError(
            "a batch holds no samples", by=by, facts=place, hint="leave empty batches out of the data"
        )


def describe(batch: Mapping[str, object]) -> str:
    """Return the fields of a batch with the types of their values."""
    flat = "a tensor without axes"
    kinds = (flat if isinstance(v, Tensor) and not v.dim() else type(v).__name__ for v in batch.values())
    return ", ".join(f"{name}: {kind}" for name, kind in zip(batch, kinds, strict=True))


DataState = dict[str, object]
MAKING = 1  # separates the random numbers that make an epoch from those of a step


@runtime_checkable
class Stateful(Protocol):
    """Data that can save and restore its position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: dict[str, object], /) -> None: ...


class Feed:
    """The batches of `make()`, over and over: when they end, `make()` is called for the next epoch.

    Random numbers that the data draws in this process come from (seed, step), so a loader that shuffles or a
    transform that draws random numbers gives the same in every run, and after a resume.
    """

    def __init__(self, make: Callable[[], Iterable[Given]], seed: int) -> None:
        self.make, self.seed = make, seed
        self.step = self.epoch = 0
        self._data = self._made()
        self._batches: Iterator[Given] | None = None

    def __iter__(self) -> Iterator[Given]:
        return self

    def __next__(self) -> Given:
        with dice(self.seed, self.step):
            batch = self._next()
        self.step += 1
        return batch

    def _next(self) -> Given:
        if self._batches is None:
            self._batches = begin(self._data, self.make)
        batch = take(self._batches, self.step + 1, self.make)
        if batch is None:
            self.epoch += 1
            self._data = self._made()
            self._batches = begin(self._data, self.make)
            batch = take(self._batches, self.step + 1, self.make)
        if batch is None:
            raise ConfigError(
                f"data() ended after {self.step} batches",
                by=named("data", self.make),
                facts={"epoch": f"{self.epoch}, and it holds no batch"},
                hint="let data() make new batches each time it is called, or train fewer steps",
            )
        return batch

    def _made(self) -> Iterable[Given]:
        """Make the data of this epoch. Give its number to samplers that shuffle by epoch."""
        # Some samplers draw their order when they are made, so that draw depends on the seed alone too.
        with dice(self.seed, self.epoch, MAKING):
            data = call_data(self.make)
        with naming(self.make, "set_epoch()"):
            for part in (data, getattr(data, "sampler", None), getattr(data, "dataset", None)):
                tell = getattr(part, "set_epoch", None)
                if callable(tell):
                    tell(self.epoch)
        return data

    def state_dict(self) -> DataState:
        """Return the position in the data, with the data's own state if it has one."""
        with naming(self.make, "state_dict()"):
            own = self._data.state_dict() if isinstance(self._data, Stateful) else None
        return {"step": self.step, "epoch": self.epoch, "data": own}

    def seek(self, step: int, state: object = None) -> None:
        """Go on from a position: at once where the data can, else by reading what came before.

        state: as `state_dict` returned it. If it is something else, `step` batches are passed over.
        """
        position = state if is_position(state) else {"step": step, "epoch": 0, "data": None}
        step, own = int(str(position["step"])), position["data"]
        if isinstance(self._data, Batches):
            self._data.load_state_dict({"step": step})
            self._batches, self.step = None, step
        elif isinstance(own, dict) and isinstance(self._data, Stateful):
            self.epoch = int(str(position["epoch"]))
            self._data = self._made()
            assert isinstance(self._data, Stateful)
            with naming(self.make, "load_state_dict()"):
                self._data.load_state_dict(own)
            self._batches, self.step = None, step
        while self.step < step:
            next(self)


def is_position(state: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether a value is the position of a feed."""
    return isinstance(state, Mapping) and state.keys() == {"step", "epoch", "data"}


def one_epoch(make: Callable[[], Iterable[Given]], seed: int) -> Iterator[Given]:
    """Yield the batches of one call of `data`. What the data draws is the same each time."""
    with dice(seed, 0, MAKING):
        batches = begin(call_data(make), make)
    for step in count():
        with dice(seed, step):
            batch = take(batches, step + 1, make)
        if batch is None:
            return
        yield batch


@contextmanager
def dice(seed: int, *numbers: int) -> Iterator[None]:
    """Seed torch's generator inside with these numbers, and restore it afterwards."""
    drawn = np.random.SeedSequence([abs(seed), *numbers]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(drawn))
        yield
