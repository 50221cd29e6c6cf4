"""Takes batches from the user's data. Its exceptions, and values that are no batch, become one message."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import GeneratorType

from torch import Tensor

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
        raise placed(error, make) from error.__cause__
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
        check_fields(batch, step, make)
    return batch


def batches_of(make: Make) -> Iterator[Given]:
    """Yield the batches of one call of `data`, until they end."""
    batches = begin(call_data(make), make)
    for step in count(1):
        batch = take(batches, step, make)
        if batch is None:
            return
        yield batch


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


def placed(error: PiperError, make: Make) -> PiperError:
    """Return an error of our own data classes with the user's line that made or called them."""
    frames = users_frames(error)
    where = frames[-1][0].partition(" in ")[0] if frames else defined_at(make)
    return error.located(f"{error.by} ({where})") if where else error


def check_fields(batch: object, step: int, make: Make) -> None:
    """Refuse a batch that is not a dict of tensors with the same number of samples each."""
    by, at = named("data", make), f"the batch of step {step}"
    fields = batch if isinstance(batch, Mapping) else {}
    if not fields or not all(isinstance(v, Tensor) and v.dim() for v in fields.values()):
        raise ConfigError(
            "a batch is not a dict of tensors",
            by=by,
            facts={"at": at, "got": describe(fields) if fields else type(batch).__name__},
            hint='yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; '
            "leave texts and lists out",
        )
    sizes = {str(name): len(value) for name, value in fields.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "the fields of a batch disagree on the number of samples",
            by=by,
            facts={"at": at, **{name: f"{size} samples" for name, size in sizes.items()}},
            hint="the first axis of every field is the samples",
        )
    if not all(sizes.values()):
        raise ConfigError(
            "a batch holds no samples", by=by, facts={"at": at}, hint="leave empty batches out of the data"
        )


def describe(batch: Mapping[str, object]) -> str:
    """Return the fields of a batch with the types of their values."""
    flat = "a tensor without axes"
    kinds = (flat if isinstance(v, Tensor) and not v.dim() else type(v).__name__ for v in batch.values())
    return ", ".join(f"{name}: {kind}" for name, kind in zip(batch, kinds, strict=True))
