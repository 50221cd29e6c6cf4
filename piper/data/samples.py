"""Datasets of other libraries: those that give samples by index, and those that are only iterated."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from piper.data.batches import Batch, Batches, Places
from piper.errors import ConfigError


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
        """Return these samples as one batch."""
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
    if not all(isinstance(sample, Mapping) for sample in samples):
        odd = next(type(sample).__name__ for sample in samples if not isinstance(sample, Mapping))
        raise ConfigError(
            f"a sample is {odd}, not a dict",
            by=by,
            hint='give samples such as {"tokens": ..., "labels": ...}',
        )
    return {field: joined([sample[field] for sample in samples], field, by) for field in samples[0]}


def joined(values: Sequence[object], field: str, by: str) -> Tensor:
    """Stack one field of several samples into a tensor."""
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the samples' field {field!r} does not make a tensor",
            by=by,
            facts={"why": str(error).splitlines()[0]},
            hint="keep fields of numbers only, of one length: leave out texts, cut or pad the rest",
        ) from None
