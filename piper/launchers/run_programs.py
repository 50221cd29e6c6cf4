"""The programs of a run: one for each shape of batches that it trains on, and of those it evaluates on.

Workers are started with one program, which has the number 0. The others are compiled when a batch of their
shape comes, and sent to the workers, whose parameters, optimizer and communicators they use too. An
evaluation runs forward-only programs, and its sums become weighted means.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from piper.data.feed import one_epoch
from piper.errors import ConfigError
from piper.ir.format import size
from piper.launchers.base import EvaluationResult, Resumed, StepResult, ratio, result_of, state_by_name
from piper.launchers.checkpointing import Checkpoints
from piper.launchers.messages import Call
from piper.launchers.run import Batch, Run
from piper.plan.divided import Share
from piper.plan.memory_timeline import timeline
from piper.plan.plan import Bucket, Plans
from piper.runtime.batch import (
    as_run,
    check_batch,
    padded,
    read_shapes,
    shapes_of,
)
from piper.runtime.compute import slices_of
from piper.runtime.debug.output_recorder import OutputKey
from piper.runtime.debug.profiler import ClockOffset, DeviceProfile, compare
from piper.runtime.full_values import whole_buffers, whole_parameters, whole_state
from piper.runtime.setup import ProgramLike, Shapes, initial_tensors
from piper.runtime.uneven import COUNTS
from piper.runtime.worker import Options, Sums

MANY = 8  # shapes after which a message says how to need fewer
log = logging.getLogger("piper")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """Samples of a batch that run together.

    copies: how often each sample occurs in `batch`, where fewer samples are left than there are slices.
    """

    batch: Batch
    samples: int
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The sums of an evaluation so far."""

    loss: float = 0.0
    weight: float = 0.0
    metrics: tuple[float, ...] = ()  # the sum and the weight of each metric
    samples: int = 0
    batches: int = 0

    def add(self, plans: Plans, piece: SampleGroup, sums: Sums) -> "Means":
        """Return these sums with those of one piece. A mean loss counts by the samples of the piece."""
        if plans.weighted:
            loss, weight = sums.loss / piece.copies, sums.weight / piece.copies
        else:
            loss, weight = sums.loss * plans.seed * piece.samples, float(piece.samples)
        found = [value / piece.copies for value in sums.metrics]
        before = self.metrics or (0.0,) * len(found)
        return replace(
            self,
            loss=self.loss + loss,
            weight=self.weight + weight,
            metrics=tuple(a + b for a, b in zip(before, found, strict=True)),
            samples=self.samples + piece.samples,
        )

    def result(self, names: Iterable[str]) -> EvaluationResult:
        """Return the weighted means of the loss and of the named metrics."""
        pairs = zip(self.metrics[::2], self.metrics[1::2], strict=True)
        return EvaluationResult(
            loss=ratio(self.loss, self.weight),
            metrics={name: ratio(*pair) for name, pair in zip(names, pairs, strict=True)},
            samples=self.samples,
            batches=self.batches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A program that workers are ready to run, and its number among those of a run."""

    number: int
    program: ProgramLike
    buffers: Mapping[str, Tensor]  # those that came from the driver: the first program does not use them


class ProgramRun(Run):
    """A run whose workers hold several programs. Each shape of batches gets one, compiled when first seen."""

    plans: Plans
    unread: dict[str, Tensor]  # the values that no worker holds
    checkpoints: Checkpoints
    busy: dict[int, float]  # seconds that each device computed in the last step, where it is known

    def __init__(self, program: ProgramLike, options: Options) -> None:
        self.program, self.plans, self.options = program, program.plans, options
        self.devices = program.plans.devices
        self.first = Prepared(number=0, program=program, buffers={})
        self.prepared: dict[tuple[bool, Shapes], Prepared] = {}  # by whether it trains, and by shape
        self.preparations = 0  # how many programs workers have been given since they were started

    def step(self, batch: Batch) -> StepResult:
        check_batch(batch, self.wanted)
        rows, first = as_run(self.program, batch, self.wanted)
        ready = self.first if first else self._prepared(rows, trains=True, given=batch)
        sums = self._step(ready, rows)
        self.done += 1
        return result_of(ready.program.plans, ready.program.outline, sums)

    def _prepared(self, batch: Batch, *, trains: bool, given: Batch | None = None) -> Prepared:
        """Return the program for batches of these shapes. Compile it and prepare the workers if it is new.

        given: the batch before it was padded and its samples were repeated, for a message.
        """
        key = (trains, read_shapes(batch, self.wanted) if trains else shapes_of(batch))
        found = self.prepared.get(key)
        if found is not None and all(self.unread.get(name) is value for name, value in found.buffers.items()):
            return found
        if found is not None:
            program = found.program
        else:
            program = self._shaped(batch, given or batch) if trains else self.program.evaluation(batch)
        buffers = self._unheld(program)
        self.preparations += 1
        found = Prepared(number=self.preparations, program=program, buffers=buffers)
        self._prepare(found, trains=trains)
        self.prepared[key] = found
        return found

    def _shaped(self, batch: Batch, given: Batch) -> ProgramLike:
        """Return the program that trains on batches of these shapes. Say so if it has to be compiled."""
        key = read_shapes(batch, self.wanted)
        if key in self.program.shapes:
            return self.program.shaped(batch)
        sizes = ", ".join(f"{name} {list(given[name].shape)}" for name in self.wanted.shapes)
        if COUNTS in batch:
            sizes += f", with samples repeated to fill {slices_of(self.plans)} slices of equal size"
        if len(self.program.shapes) >= MANY:
            sizes += "; Job(buckets=...) pads batches to a few lengths"
        log.warning("Compiling for another shape of batches: %s", sizes)
        program = self.program.shaped(batch)
        peak, first = (max(timeline(plan).peak for plan in one.plans) for one in (program, self.program))
        log.warning("Proven. A device takes %s for it, and %s for the first shape", size(peak), size(first))
        return program

    def _unheld(self, program: ProgramLike) -> dict[str, Tensor]:
        """Return the values of the buffers that a program reads and no worker holds."""
        used, held = buffers_of(program), buffers_of(self.program)
        if missing := [name for name in used if name not in held and name not in self.unread]:
            made = initial_tensors(self.program)  # the run began from a checkpoint, which has none of them
            self.unread |= {name: made[name] for name in missing}
        return {name: self.unread[name] for name in used if name not in held}

    @abstractmethod
    def protect(self) -> None:
        """Copy the state into memory that outlives workers, where it is kept."""

    @abstractmethod
    def restore(self, step: int, unread: Mapping[str, Tensor]) -> None:
        """Take the state after a step from memory; `unread`: the values that no device holds."""

    @abstractmethod
    def _prepare(self, made: Prepared, *, trains: bool) -> None:
        """Give workers a program, and the values of buffers that only this program reads."""

    @abstractmethod
    def _step(self, ready: Prepared, batch: Batch) -> Sums:
        """Train on a global batch with a program that workers hold."""

    @abstractmethod
    def _forward(self, ready: Prepared, batch: Batch) -> Sums:
        """Run an evaluation program on a global batch."""

    def evaluate(self, batches: Iterable[Batch] | None = None) -> EvaluationResult:
        means, names = Means(), tuple[str, ...]()
        for batch in self._batches(batches):
            check_samples(batch)
            batch = padded(batch, self.program.job.buckets)
            for piece in pieces_of(batch, slices_of(self.plans)):
                ready = self._prepared(piece.batch, trains=False)
                sums = self._forward(ready, piece.batch)
                means = means.add(ready.program.plans, piece, sums)
                names = ready.program.outline.metric_names
            means = replace(means, batches=means.batches + 1)
        if not means.batches:
            raise ConfigError(
                "there is no batch to evaluate on", by="evaluate", hint="give at least one batch"
            )
        return means.result(names)

    def _batches(self, batches: Iterable[Batch] | None) -> Iterable[Batch]:
        if batches is not None:
            return batches
        asked = self.program.job.evaluate
        if asked is None:
            raise ConfigError(
                "there are no batches to evaluate on",
                by="evaluate",
                hint="give them: run.evaluate(batches); or let the job have some: "
                "piper.Job(..., evaluate=piper.Evaluate(data=...))",
            )
        return one_epoch(asked.data, self.program.job.seed)

    def write(self, path: Path | str, data: object, *, wait: bool, keep: int | None) -> None:
        self.checkpoints.save(path, data=data, wait=wait, keep=keep)

    def read(self, path: Path | str) -> Resumed:
        return self.checkpoints.load(path)

    def settle(self) -> None:
        self.checkpoints.settle()

    @abstractmethod
    def _ask(self, call: Call, arguments: Mapping[int, object]) -> dict[int, object]:
        """Call workers, each with its argument, and return their answers."""

    def state_dict(self) -> dict[str, Tensor]:
        outline, buckets = self.program.outline, list(self.plans.buckets.values())
        owned = self._owned("owned", buckets)
        parameters = whole_parameters(buckets, lambda bucket, device: owned[bucket, device])
        names = [buffer.name for buffer in outline.buffers if buffer.persistent]
        buffers: dict[str, Tensor] = {}
        if names:
            answers = self._ask("buffers", dict.fromkeys(self.devices, names))
            held = [cast("dict[str, tuple[Share, Tensor]]", answers[device]) for device in self.devices]
            buffers = whole_buffers(held)
        whole = state_by_name(outline, self.unread | parameters | buffers)
        return {name: value.to("cpu", copy=True) for name, value in whole.items()}

    def gradients(self) -> dict[str, Tensor]:
        buckets = list(self.plans.buckets.values())
        owned = self._owned("gradients", buckets)
        given = [bucket for bucket in buckets if owned[bucket.name, bucket.groups[0][0]] is not None]
        first = self.devices[0]
        reached = cast("set[str]", self._ask("reached", {first: None})[first])
        whole = whole_parameters(given, lambda bucket, device: owned[bucket, device])
        return {name: value for name, value in whole.items() if name in reached}

    def _owned(self, call: Call, buckets: Sequence[Bucket]) -> dict[tuple[str, int], Tensor]:
        answers = self._ask(call, holders(buckets))
        return {
            (bucket, device): value
            for device, found in answers.items()
            for bucket, value in cast("dict[str, Tensor]", found).items()
        }

    def trails(self) -> dict[int, dict[OutputKey, Tensor]]:
        answers = self._ask("trail", dict.fromkeys(self.devices))
        return cast("dict[int, dict[OutputKey, Tensor]]", answers)

    def recordings(self) -> dict[int, tuple[DeviceProfile, ClockOffset]]:
        found: dict[int, tuple[DeviceProfile, ClockOffset]] = {}
        for device, answer in self._ask("record", dict.fromkeys(self.devices)).items():
            if isinstance(answer, DeviceProfile):
                found[device] = (answer, compare(lambda asked=device: self._time(asked)))  # type: ignore[misc]
        return found

    def _time(self, device: int) -> float:
        return cast(float, self._ask("clock", {device: None})[device])

    def optimizer_groups(self) -> list[dict[str, object]]:
        found = self._ask("optimizer_options", dict.fromkeys(self.devices)).values()
        return next((cast("list[dict[str, object]]", groups) for groups in found if groups is not None), [])

    def set_optimizer_option(self, group: int, key: str, value: float) -> None:
        self._ask("set_optimizer_option", dict.fromkeys(self.devices, (group, key, value)))

    def optimizer_state(self, key: str) -> dict[str, Tensor]:
        buckets = [bucket for bucket in self.plans.buckets.values() if bucket.trainable]
        asked = {device: (key, names) for device, names in holders(buckets).items()}
        answers = self._ask("optimizer_state", asked)
        owned = {
            (bucket, device): value
            for device, found in answers.items()
            for bucket, value in cast("dict[str, tuple[Tensor, tuple[str, ...]]]", found).items()
        }
        return whole_state(buckets, owned)


def buffers_of(program: ProgramLike) -> list[str]:
    """Return the names of the buffers that the devices of a program hold."""
    slots = (slot for plan in program.plans for slot in plan.residents if slot.kind == "buffer")
    return sorted({slot.owner for slot in slots})


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


def holders(buckets: Sequence[Bucket]) -> dict[int, list[str]]:
    """Return which devices to ask for which buckets, so that their answers hold every element once."""
    asked: dict[int, list[str]] = {}
    for bucket in buckets:
        for group in bucket.distinct:
            for device in group if bucket.zero else group[:1]:
                asked.setdefault(device, []).append(bucket.name)
    return asked
