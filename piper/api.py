"""From a job to a proven program: capture, directives, lowering, proof."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from piper.capture.cache import CACHE, Cache
from piper.capture.differentiate import Captured, differentiate
from piper.capture.trace import Traced, trace
from piper.directives import Directive, Place, Replicate, Shard, Split, apply
from piper.directives.json import load_strategy
from piper.errors import ConfigError
from piper.explain import explain, origins
from piper.ir.chunk import Chunk, Outline, Phase
from piper.ir.graph import Graph, start
from piper.job import Batch, Job
from piper.lower.lower import lower
from piper.lower.settle import parts_of
from piper.lower.work import Settings, Work
from piper.plan.plan import Plans
from piper.probe import probe_optimizer
from piper.runtime.setup import device_kind, device_of

MASTER_BYTES = {"fp32": 0, "bf16": 4, "fp64": 0}  # bf16 trains a float32 copy of each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A job compiled and proven: the graph, the plans, and the code they call."""

    job: Job
    graph: Graph
    plans: Plans
    work: Work
    codes: Mapping[int, Captured]  # by the samples in a slice: usually one
    device: str = "cpu"  # the kind of device that it was captured for, and runs on: cpu or cuda

    @property
    def outline(self) -> Outline:
        """The model's chunks, each for the slice of samples it gets."""
        return self.graph.outline

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors that the trace lifted out of the model."""
        return {name: value for code in self.codes.values() for name, value in code.constants.items()}

    def code(self, chunk: Chunk, phase: Phase) -> Callable[..., tuple[Tensor, ...]]:
        """The code of one phase of a chunk, called as its `PhaseSpec` says."""
        for captured in self.codes.values():
            if chunk.key in captured.codes:
                return captured.phase(chunk.key, phase)
        raise KeyError(chunk.key)

    def explain(self, node: str) -> str:
        """Say of a node what it is, where it runs, which directives made it so, and what it waits for."""
        return explain(self.work, self.plans, node)

    def origins(self, node: str) -> list[str]:
        """The directives that made a node what it is, each with its source line."""
        return origins(self.work, node)


def compile(  # the contract's name; `builtins.compile` is of no use to our users
    job: Job, *, device: str | None = None, compile: bool = False, cache: Path | str = CACHE
) -> Program:
    """Capture a job's model, apply its strategy, lower it to plans and prove them.

    device: what it is captured for and runs on, `cpu` or `cuda`; otherwise CUDA where there is any.
    compile: its chunks run as Inductor compiles them, which happens when they are first asked for, and not
    again while `cache` has them; otherwise operation by operation.
    """
    kind = device_kind(device)
    strategy = strategy_of(job)
    batch = first_batch(job)
    samples = len(next(iter(batch.values())))
    probe = probe_optimizer(job.optimizer)
    settings = Settings(
        samples=samples,
        clip=job.clip_norm is not None,
        state_bytes=probe.state_bytes,
        master_bytes=MASTER_BYTES[job.precision],
        optimizer=probe.name,
        needs_whole=probe.why,
    )
    codes: dict[int, Captured] = {}
    kept = Cache(folder=Path(cache)) if compile else None

    def traced_at(rows: int) -> Traced:
        return trace(job.model, job.loss, batch, rows, job.precision, device_of(kind), compiled=compile)

    def captured(graph: Graph) -> Outline:
        codes.update(capture_slices(graph, samples, {traced.rows: traced}, traced_at, kept))
        return outline_by_slice(graph, samples, codes)

    traced = traced_at(likely_rows(strategy, samples))
    plans, work = lower(apply(start(traced.outline), strategy), settings, captured)
    reasons = [reason for code in codes.values() for reason in code.reasons()]
    return Program(
        job=job,
        graph=work.graph,
        plans=replace(plans, why=(*plans.why, *reasons)),
        work=work,
        codes=codes,
        device=kind,
    )


def strategy_of(job: Job) -> list[Directive]:
    """A job's directives, read from its file where it names one."""
    if isinstance(job.strategy, Path | str):
        return load_strategy(Path(job.strategy))
    return list(job.strategy)


def first_batch(job: Job) -> Batch:
    """The first batch of a job's data: its shapes stand for all."""
    data = job.data()
    try:
        batch = next(iter(data), None)
    except TypeError:
        raise ConfigError(
            f"data() returned {type(data).__name__}, which cannot be iterated",
            by="Job",
            hint="return the batches: a list, a generator or a DataLoader of dicts of tensors",
        ) from None
    if batch is None:
        raise ConfigError("data() holds no batch", by="Job", hint="return at least one batch")
    bad = not isinstance(batch, Mapping) or not batch
    if bad or not all(isinstance(v, Tensor) and v.dim() for v in batch.values()):
        raise ConfigError(
            "a batch is not a dict of tensors",
            by="Job",
            facts={"got": type(batch).__name__ if bad else describe(batch)},
            hint='yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples',
        )
    if len({len(value) for value in batch.values()}) > 1:
        raise ConfigError(
            "the fields of a batch disagree on the number of samples",
            by="Job",
            facts={name: f"{len(value)} samples" for name, value in batch.items()},
            hint="the first axis of every field is the samples",
        )
    return batch


def describe(batch: Mapping[str, object]) -> str:
    """What a batch holds, field by field."""
    return ", ".join(f"{name}: {type(value).__name__}" for name, value in batch.items())


def likely_rows(strategy: list[Directive], samples: int) -> int:
    """The samples of one slice, if all sets of devices are of one size; a wrong guess costs a trace."""
    sizes = {len(d.devices) for d in strategy if isinstance(d, Place | Replicate | Shard)}
    parts = math.prod(d.parts for d in strategy if isinstance(d, Split) and isinstance(d.parts, int))
    return max(1, samples // max(1, max(sizes, default=1) * parts))


def rows_of(graph: Graph, samples: int) -> dict[str, int]:
    """How many samples each chunk sees at a time."""
    homes = {node.chunk: len(node.devices) for node in graph.nodes.values()}
    return {chunk: samples // (size * parts_of(graph, chunk)) for chunk, size in homes.items()}


def capture_slices(
    graph: Graph,
    samples: int,
    traces: dict[int, Traced],
    traced_at: Callable[[int], Traced],
    cache: Cache | None = None,
) -> dict[int, Captured]:
    """The model differentiated for every size of slice that its chunks get."""
    ways = {
        chunk.name: graph.policy(chunk.name).ways for chunk in graph.outline.chunks if chunk.kind == "expert"
    }
    needed = sorted(set(rows_of(graph, samples).values()))
    return {
        rows: differentiate(traces.get(rows) or traced_at(rows), ways, graph.budgets, cache)
        for rows in needed
    }


def outline_by_slice(graph: Graph, samples: int, codes: Mapping[int, Captured]) -> Outline:
    """One outline, with each chunk as captured for its own slice."""
    rows = rows_of(graph, samples)
    by_rows = {size: {chunk.name: chunk for chunk in code.outline.chunks} for size, code in codes.items()}
    first = next(iter(codes.values())).outline
    names = [chunk.name for chunk in graph.outline.chunks]
    for size, chunks in by_rows.items():
        assert list(chunks) == names, f"the model has other chunks for slices of {size} samples"
    return replace(first, chunks=tuple(by_rows[rows[name]][name] for name in names))
