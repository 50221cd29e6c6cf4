"""A job's batches in the order of its steps, from any step on and from any kind of data."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch

from piper.data.batches import Batches
from piper.data.taking import Given, begin, call_data, naming, take
from piper.errors import ConfigError
from piper.process.usercode import named

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
        """Make the data of this epoch. Give its number to samplers that shuffle by epoch.

        Some samplers draw their order when they are made, so that draw depends on the seed alone too.
        """
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
