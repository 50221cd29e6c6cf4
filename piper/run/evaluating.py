"""The batches of an evaluation, and the groups of samples that its program takes at a time."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from piper.data.feed import one_epoch
from piper.errors import ConfigError
from piper.job import Job
from piper.workers.results import Batch, SampleGroup


def evaluation_batches(job: Job) -> Iterable[Batch]:
    """Return the batches that a job evaluates on."""
    if job.evaluate is None:
        raise ConfigError(
            "there are no batches to evaluate on",
            by="evaluate",
            hint="give them: run.evaluate(batches); or let the job have some: "
            "piper.Job(..., evaluate=piper.Evaluate(data=...))",
        )
    return one_epoch(job.evaluate.data, job.seed)


def pieces_of(batch: Batch, slices: int) -> Iterator[SampleGroup]:
    """Yield a batch in pieces whose samples divide into slices, each sample in exactly one piece.

    A remainder runs with copies of its samples, one for each slice: 3 samples in 4 slices run as 2 samples
    twice, then 1 sample four times. The sums are divided by the number of copies, so they stay exact.
    """
    samples = len(next(iter(batch.values())))
    start = samples - samples % slices
    if start:
        whole = batch if start == samples else {name: field[:start] for name, field in batch.items()}
        yield SampleGroup(batch=whole, samples=start)
    while start < samples:
        some = next(n for n in range(samples - start, 0, -1) if slices % n == 0)
        copies = slices // some
        rows = {name: torch.cat([field[start : start + some]] * copies) for name, field in batch.items()}
        yield SampleGroup(batch=rows, samples=some, copies=copies)
        start += some


def check_samples(batch: object) -> None:
    """Refuse a batch that is not a dict of tensors with the same number of samples, at least one."""
    fields = batch if isinstance(batch, Mapping) else {}
    sizes = {
        name: field.shape[0] if isinstance(field, Tensor) and field.dim() else 0
        for name, field in fields.items()
    }
    if not sizes or 0 in sizes.values() or len(set(sizes.values())) > 1:
        got = ", ".join(f"{name} {size}" for name, size in sizes.items()) or type(batch).__name__
        raise ConfigError(
            "a batch to evaluate on is a dict of tensors with the same number of samples",
            by="evaluate",
            facts={"got": got},
            hint='give {"tokens": tokens, "labels": labels}, each with one row for each sample',
        )
