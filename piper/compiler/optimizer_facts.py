"""Finds out what a job's optimizer keeps and needs, by trying it on what each device holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from piper.compiler.optimizer_probe import Probe, probe_optimizer
from piper.errors import ConfigError, ScheduleError
from piper.ir.dtypes import job_precision
from piper.ir.graph import Graph
from piper.job import Job
from piper.lower.buckets import ProgramBuckets, with_whole_parameters
from piper.plan.updates import BucketUpdate
from piper.runtime.trainers import empty_optimizer, try_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What lowering has to know about an optimizer."""

    state_bytes: int  # of state for one element of a parameter, with what a step needs beside it
    whole: bool = False  # it needs whole parameters: under ZeRO each has one owner


def facts_of_optimizer(job: Job, graph: Graph, buckets: ProgramBuckets) -> OptimizerFacts:
    """Try a job's optimizer and scheduler on what each device holds of a model."""
    trained = trained_in(buckets)
    sizes = {p.name: p.shape for p in graph.outline.parameters if p.trainable}
    whole = False
    try:
        probe = probe_optimizer(job.optimizer, sizes, trained)
    except ConfigError:
        if not any(bucket.zero or piece.shardings for bucket in trained for piece in bucket.pieces):
            raise
        whole = True
        cut = with_whole_parameters(buckets)
        probe = probe_optimizer(job.optimizer, sizes, trained_in(cut))
        sliced = {chunk: b.pieces[0].name for b in cut.read.values() if b.slices for chunk in b.chunks}
        check_offloaded(probe, graph, sliced)
    check_streamed(probe, graph)
    optimizer = empty_optimizer(job.optimizer, trained, sizes) if job.scheduler is not None else None
    if optimizer is not None and job.scheduler is not None:
        try_scheduler(job.scheduler, optimizer, job.steps)
    types = job_precision(job.precision)
    # Of an optimizer that steps all parameters at once, those that are split are joined all at once.
    joined = types.sum_itemsize if types.splits and not probe.ours else 0
    return OptimizerFacts(state_bytes=probe.state_bytes + joined, whole=whole)


def trained_in(buckets: ProgramBuckets) -> tuple[BucketUpdate, ...]:
    """Return the buckets of parameters that a backward reaches, as their optimizer sees them."""
    return tuple(bucket.update for bucket in buckets.read.values() if bucket.trainable)


def check_offloaded(probe: Probe, graph: Graph, sliced: Mapping[str, str]) -> None:
    """Refuse to offload the state of parameters that are updated in full. sliced: one of them, by chunk."""
    for chunk, offload in graph.chosen(lambda options: options.offload_state).items():
        if chunk in sliced:
            raise ScheduleError(
                f"the state of {probe.name} for sharded parameters cannot be offloaded",
                by=graph.directives[offload.by].title,
                facts={
                    "parameter": sliced[chunk],
                    "why": "one device updates it in full, and gives the others their slices",
                },
                hint="use an elementwise optimizer such as AdamW, or leave this directive out",
            )


def check_streamed(probe: Probe, graph: Graph) -> None:
    """Refuse an optimizer whose state a strategy offloads, if it may not be stepped bucket by bucket."""
    offloaded = graph.chosen(lambda options: options.offload_state)
    if offloaded and not probe.ours:
        by = next(iter(offloaded.values())).by
        raise ScheduleError(
            f"the state of {probe.name} cannot be offloaded",
            by=graph.directives[by].title,
            facts={"why": "it would be stepped once for each bucket, and it may count its steps"},
            hint="use an optimizer of torch.optim, or leave this directive out",
        )
