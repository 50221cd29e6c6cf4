"""Finds out what a job's optimizer keeps and needs, by trying it on what each device holds."""

from dataclasses import dataclass, replace

from piper.compiler.optimizer_probe import check_streamed, probe_optimizer
from piper.errors import ConfigError
from piper.ir.graph import Graph
from piper.job import Job
from piper.lower.buckets import make_buckets
from piper.lower.state import LoweringState, Settings
from piper.plan.plan import Bucket
from piper.runtime.trainers import empty_optimizer, try_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What lowering has to know about an optimizer."""

    state_bytes: int  # of state for one element of a parameter
    whole: bool = False  # it needs whole parameters: under ZeRO each has one owner


def facts_of_optimizer(job: Job, graph: Graph, settings: Settings) -> OptimizerFacts:
    """Try a job's optimizer and scheduler on what each device holds of a model."""
    buckets = trained_buckets(graph, settings)
    sizes = {p.name: p.shape for p in graph.outline.parameters if p.trainable}
    policies = {bucket.name: graph.policy(bucket.chunks[0]).origin for bucket in buckets}
    made_by = {name: graph.directives[n].title for name, n in policies.items() if n is not None}
    whole = False
    try:
        probe = probe_optimizer(job.optimizer, sizes, buckets, made_by)
    except ConfigError:
        if not any(bucket.zero for bucket in buckets):
            raise
        whole = True
        cut = trained_buckets(graph, replace(settings, whole=True))
        probe = probe_optimizer(job.optimizer, sizes, cut, made_by)
    check_streamed(probe, graph)
    optimizer = empty_optimizer(job.optimizer, buckets, sizes) if job.scheduler is not None else None
    if optimizer is not None and job.scheduler is not None:
        try_scheduler(job.scheduler, optimizer, job.steps)
    return OptimizerFacts(state_bytes=probe.state_bytes, whole=whole)


def trained_buckets(graph: Graph, settings: Settings) -> tuple[Bucket, ...]:
    """Return the buckets of parameters that a backward reaches."""
    buckets = make_buckets(LoweringState(graph=graph, settings=settings)).buckets.values()
    return tuple(bucket for bucket in buckets if bucket.trainable)
