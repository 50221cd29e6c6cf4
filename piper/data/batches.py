"""Batches of samples that can be counted: which samples a step gets is a function of seed and step."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piper.data.tokenizers import DTYPE, ByteTokenizer, Tokenizer
from piper.errors import ConfigError, file_errors

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


class Dataset(Protocol):
    """A map-style dataset: torch's, Hugging Face's, or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, object]: ...


class Samples(Batches):
    """Batches of a dataset that gives its samples by index, each a dict of tensors or numbers."""

    def __init__(self, dataset: Dataset, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"{type(dataset).__name__} does not give samples by number",
                by="Samples",
                hint="give something with len() and [i], or use Stream for what can only be iterated",
            )
        super().__init__(len(dataset), batch, seed, shuffle)
        self.dataset = dataset

    def collect(self, samples: Places) -> Batch:
        return stacked([self.dataset[int(index)] for index in samples], "Samples")


class Stream:
    """Batches of a dataset that can only be iterated, in its own order. At its end it is iterated again.

    A batch may span the end, so no sample is left out. Resuming at a step reads all samples before it.
    """

    def __init__(self, dataset: Iterable[Mapping[str, object]], batch: int) -> None:
        if batch < 1:
            raise ConfigError(f"batch={batch}", by="Stream", hint="choose a batch of at least 1 sample")
        self.dataset, self.batch = dataset, batch

    def __iter__(self) -> Iterator[Batch]:
        samples = self._endless()
        while True:
            yield stacked([*islice(samples, self.batch)], "Stream")

    def _endless(self) -> Iterator[Mapping[str, object]]:
        while True:
            empty = True
            for sample in self.dataset:
                empty = False
                yield sample
            if empty:
                raise ConfigError(
                    "the dataset gives no sample",
                    by="Stream",
                    facts={"dataset": type(self.dataset).__name__},
                    hint="give a dataset that is not empty and can be iterated again, not a generator",
                )


def stacked(samples: Sequence[Mapping[str, object]], by: str) -> Batch:
    """Stack samples into one batch, each field along a new first axis."""
    batch: Batch = {}
    if odd := [type(sample).__name__ for sample in samples if not isinstance(sample, Mapping)]:
        hint = 'give samples such as {"tokens": ..., "labels": ...}'
        raise ConfigError(f"a sample is {odd[0]}, not a dict", by=by, hint=hint)
    for field in samples[0]:
        try:
            batch[field] = torch.stack([torch.as_tensor(sample[field]) for sample in samples])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the samples' field {field!r} does not make a tensor",
                by=by,
                facts={"why": str(error).splitlines()[0]},
                hint="keep fields of numbers only, of one length: leave out texts, cut or pad the rest",
            ) from None
    return batch


class Windows(Batches):
    """Windows of `length` tokens, each labelled with the tokens that follow; they do not overlap."""

    def __init__(
        self, tokens: NDArray[np.integer], length: int, batch: int, seed: int, shuffle: bool, by: str
    ) -> None:
        if length < 1:
            raise ConfigError(f"length={length}", by=by, hint="choose a window of at least 1 token")
        if len(tokens) <= length:
            raise ConfigError(
                "the data is too short for one window",
                by=by,
                facts={"length": f"{length} tokens and the one after", "data": f"{len(tokens)} tokens"},
                hint="choose a shorter window, or give more data",
            )
        super().__init__((len(tokens) - 1) // length, batch, seed, shuffle)
        self.tokens, self.length = tokens, length

    def collect(self, samples: Places) -> Batch:
        starts = (int(index) * self.length for index in samples)
        rows = [np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64) for start in starts]
        windows = torch.from_numpy(np.stack(rows))
        return {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


class TokenFile(Windows):
    """Batches of a NumPy token file, plain integers one after another: mapped, never read as a whole."""

    def __init__(
        self,
        path: Path | str,
        length: int,
        batch: int,
        seed: int = 0,
        dtype: str = DTYPE,
        shuffle: bool = True,
    ) -> None:
        super().__init__(mapped(Path(path), dtype), length, batch, seed, shuffle, by=str(path))


class TextFile(Windows):
    """Batches of a text file, held in memory as tokens: bytes, unless a tokenizer is given."""

    def __init__(
        self,
        path: Path | str,
        length: int,
        batch: int,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        shuffle: bool = True,
    ) -> None:
        with file_errors("the text cannot be read", path, "give the path of a UTF-8 text"):
            text = Path(path).read_text(encoding="utf-8")
        tokens = (tokenizer or ByteTokenizer()).encode(text)
        super().__init__(tokens, length, batch, seed, shuffle, by=str(path))


def mapped(path: Path, dtype: str) -> NDArray[np.integer]:
    """Map a token file as an array, of which only the parts that are read are loaded."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype("V0")
    if kind.kind not in "iu":
        raise ConfigError(
            f"dtype={dtype!r} is not a type of tokens",
            by=str(path),
            hint="name the integers that the file was written with: 'uint16', 'int32', ...",
        )
    hint = "write one with piper.data.write_tokens, or fix the path"
    with file_errors("the token file cannot be read", path, hint):
        size = path.stat().st_size
    if size % kind.itemsize or not size:
        raise ConfigError(
            "the token file does not hold whole tokens",
            by=str(path),
            facts={"size": f"{size} bytes", "dtype": f"{kind}, {kind.itemsize} bytes each"},
            hint="name the dtype that the file was written with",
        )
    return np.memmap(path, dtype=kind, mode="r")
