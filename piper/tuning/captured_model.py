"""Captures the model that a search is for: its layers, what can be divided, and its optimizer's state."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from piper.capture.layers.short import short_capturing
from piper.capture.recordings import Capturing, Recordings
from piper.compiler.build import Program, first_batch, known_recordings
from piper.compiler.optimizer_facts import facts_of_optimizer
from piper.directives import apply, place
from piper.errors import ConfigError
from piper.ir.dtypes import job_precision
from piper.ir.graph import start
from piper.ir.select import at
from piper.job import Batch, Job
from piper.lower.buckets import make_buckets
from piper.models.tensor_plan import tensor_plan
from piper.runtime.accelerator import device_kind
from piper.simulate.costs import Costs
from piper.simulate.measured import Measured, check_model
from piper.tuning.bounds import State
from piper.tuning.choice import Divide
from piper.tuning.forked_calls import made_beside
from piper.tuning.model import BY, Model, layers_of
from piper.tuning.space import Shapes, Space, rows_of


def captured_model(
    job: Job,
    costs: Costs,
    space: Space,
    devices: int,
    captured: Program | Recordings | None = None,
    measured: Measured | None = None,
    *,
    compile: bool = False,
    workers: int = 1,
) -> Model:
    """Record a job's model for the two smallest microbatch sizes, and find what it is made of."""
    batch = first_batch(job)
    recordings = known_recordings(job, device_kind(None), batch, captured, compiled=compile)
    samples = len(next(iter(batch.values())))
    sizes = possible_rows(space, samples, devices)
    capturing = short_capturing(Capturing(batch=batch, recordings=recordings), sizes[0])
    outline = capturing.traced(sizes[0]).outline
    if measured is not None:
        check_model(measured, outline)
    tag, count = layers_of(outline)
    first = Model(
        job=replace(job, strategy=[], elastic=None),
        capturing=capturing,
        costs=costs,
        tag=tag,
        count=count,
        experts=max(chunk.experts for chunk in outline.chunks),
        divide=Divide(fields=sequence_fields(batch)),
        state=State(optimizer=0),
        samples=samples,
    )
    facts = partial(facts_of, first, recordings, sizes[0])
    second = partial(record_sizes, first, sizes[1:2])
    if workers > 1:
        found = made_beside(second, facts)
    else:
        second()
        found = None
    weights, optimizer = found or facts()
    return replace(first, divide=replace(first.divide, weights=weights), state=State(optimizer=optimizer))


def record_sizes(model: Model, sizes: Sequence[int]) -> None:
    """Record a model for microbatch sizes."""
    for rows in sizes:
        model.record(rows)


def facts_of(model: Model, recordings: Recordings, rows: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """Return the weights that can be divided, and the bytes of the optimizer for each element."""
    return weights_of(recordings), optimizer_bytes(model, rows)


def optimizer_bytes(model: Model, rows: int) -> int:
    """Try the job's optimizer on one device, and return its bytes for each element, with the master copy."""
    graph = apply(start(model.capturing.traced(rows).outline), [place(at(), [0])])
    state = facts_of_optimizer(model.job, graph, make_buckets(graph)).state_bytes
    return state + job_precision(model.job.precision).master_bytes


def possible_rows(space: Space, samples: int, devices: int) -> list[int]:
    """Return the microbatch sizes that some number of replicas allows, in order."""
    found = {rows for replicas in range(1, devices + 1) if not devices % replicas
             for rows in rows_of(space, samples, replicas)}  # fmt: skip
    if not found:
        raise ConfigError(
            f"{samples} samples in a batch cannot be cut for {devices} devices",
            by=BY,
            hint="give a batch whose samples some number of replicas divides",
        )
    return sorted(found)


def weights_of(recordings: Recordings) -> tuple[tuple[str, int], ...]:
    """Return the weights that tensor parallelism would divide. Empty: the model does not say."""
    try:
        return tuple(tensor_plan(recordings.built()).items())
    except ConfigError:
        return ()


def sequence_fields(batch: Batch) -> tuple[tuple[str, int], ...]:
    """Return the fields of a batch that context parallelism would divide. Empty: not all are sequences."""
    sequences = {name: value.shape[1] for name, value in batch.items() if has_sequence(value)}
    if len(sequences) != len(batch) or len(set(sequences.values())) != 1:
        return ()
    return tuple((name, 1) for name in sequences)


def has_sequence(value: Tensor) -> bool:
    """Return whether a field of a batch is a sequence of whole numbers for each sample."""
    return value.dim() == 2 and not value.is_floating_point() and value.shape[1] > 1


def shapes_of(model: Model, devices: int) -> Shapes:
    """Return the numbers that limit the space."""
    return Shapes(
        devices=devices,
        samples=model.samples,
        layers=model.count,
        experts=model.experts,
        tensor=bool(model.divide.weights),
        context=bool(model.divide.weights) and bool(model.divide.fields),
    )
