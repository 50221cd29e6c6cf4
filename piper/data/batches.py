"""Batches of samples that can be counted: which samples a step gets is a function of seed and step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piper.errors import ConfigError

Batch = dict[str, Tensor]
Places = NDArray[np.int64]
Words = NDArray[np.uint64]
ROUNDS = 6


class Batches(ABC):
    """Global batches without end, epoch after epoch.

    The samples of all epochs form one sequence, of which every step takes the next `batch`: a batch may reach
    into the next epoch, and no sample is left over. State is the number of the next step: as with torchdata,
    `load_state_dict` sets it for the next `iter`, and `state_dict` returns that of the last one.
    """

    def __init__(self, samples: int, batch: int, seed: int, shuffle: bool) -> None:
        by = type(self).__name__
        if batch < 1 or batch > samples:
            raise ConfigError(
                "the batch does not fit the data",
                by=by,
                facts={"batch": f"{batch} samples", "data": f"{samples} samples"},
                hint=f"choose a batch from 1 to {samples}" if samples else "give data that is not empty",
            )
        if seed < 0:
            raise ConfigError(f"seed={seed}", by=by, hint="choose a seed from 0")
        self.samples, self.batch, self.seed, self.shuffle = samples, batch, seed, shuffle
        self._next = self._first = 0

    @abstractmethod
    def collect(self, samples: Places) -> Batch:
        """Return these samples as one batch."""

    def samples_of(self, step: int) -> Places:
        """Return the samples of step `step`, in order. Steps count from 0."""
        places = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)
        epochs, places = places // self.samples, places % self.samples
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                places[here] = Shuffle(self.samples, self.seed, int(epoch))(places[here])
        return places

    def at(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self.collect(self.samples_of(step))

    def __iter__(self) -> Iterator[Batch]:
        self._next, self._first = self._first, 0
        while True:
            batch = self.at(self._next)
            self._next += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return how many batches the last `iter` has given."""
        return {"step": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next `iter` go on from there."""
        self._first = self._next = state["step"]


class Shuffle:
    """A permutation of 0 ... size - 1 that a seed and an epoch decide, computed index by index, not stored.

    A Feistel network: each round swaps and mixes the two halves of a number's bits and can be inverted, so
    no two numbers map to one. It permutes the next power of four. A number that lands outside the range is
    permuted again until it lands inside (cycle walking), which it does because it started inside.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self.half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        state = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
        self.keys: Words = state.astype(np.uint64)

    def __call__(self, places: Places) -> Places:
        """Return the entries of the permutation at these places."""
        entries = self._rounds(places.astype(np.uint64))
        while (outside := entries >= self.size).any():
            entries[outside] = self._rounds(entries[outside])
        return entries.astype(np.int64)

    def _rounds(self, numbers: Words) -> Words:
        left, right = numbers >> self.half, numbers & self.mask
        for key in self.keys:
            left, right = right, left ^ (mixed(right + key) & self.mask)
        return (left << self.half) | right


def mixed(words: Words) -> Words:
    """Spread every bit of each word over the whole word; overflow is meant."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
