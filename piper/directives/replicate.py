"""`replicate`: the same parameters on several devices, kept equal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper.directives.base import (
    Directive,
    checked_devices,
    given_devices,
    given_filter,
    given_stream,
    is_whole,
    registered,
    selected,
    spelt,
    touched,
)
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.select import At

ZERO_LEVELS = (0, 1, 2, 3)
REDUCED = ("fp32", "bf16")
FLAGS = {"shard_optimizer": 1, "shard_grads": 2, "shard_params": 3}  # what JSON says for a level


@registered(1)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replicate(Directive):
    """Keep the selected chunks' parameters on every device of a set, whole or sharded.

    B[PP=0] @0
    -->
    B[PP=0] @0,2 --> reduce over 0,2 --> update       (zero: what is sharded between uses)
    """

    at: At
    devices: tuple[int, ...]
    zero: int = spelt("zero", flags=FLAGS, default=0)
    bucket_mb: float | None = spelt("bucket_size", "a size in MB", default=None)
    reduce_stream: str | None = None
    gather_stream: str | None = None
    reduce: str | None = spelt("reduce", 'the type gradients travel in: "fp32" or "bf16"', default=None)

    def apply(self, graph: Graph, number: int) -> Graph:
        by = self.title(number)
        devices = checked_devices(self.devices, by)
        self._check_levels(by)
        nodes = selected(graph, self.at, by)
        graph = graph.with_policies(
            nodes,
            lambda _, policy: replace(
                policy,
                zero=self.zero,
                bucket_mb=self.bucket_mb,
                reduce=self.reduce or "fp32",
                reduce_stream=self.reduce_stream or "reduce",
                gather_stream=self.gather_stream or "gather",
                ways=1,  # a later replicate wins over an earlier shard
                by_expert={},
                origin=number,
            ),
        )
        return graph.update(replace(node, devices=devices, origin=touched(node, number)) for node in nodes)

    def _check_levels(self, by: str) -> None:
        if not is_whole(self.zero) or self.zero not in ZERO_LEVELS:
            raise ScheduleError(
                f"there is no ZeRO level {self.zero!r}",
                by=by,
                hint="0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too",
            )
        if self.reduce is not None and self.reduce not in REDUCED:
            raise ScheduleError(
                f"reduce={self.reduce!r} is no type that gradients travel in",
                by=by,
                hint='give "fp32", or "bf16" for half the bytes between replicas',
            )
        size = self.bucket_mb
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or not size > 0):
            raise ScheduleError(
                f"bucket_mb={size!r} is not a size",
                by=by,
                hint="give bucket_mb a positive size, or leave it out for one bucket per chunk",
            )


def replicate(
    at: At,
    devices: Sequence[int],
    zero: int = 0,
    bucket_mb: float | None = None,
    reduce_stream: str | None = None,
    gather_stream: str | None = None,
    reduce: str = "fp32",
) -> Replicate:
    """Keep the selected chunks' parameters equal on `devices`; `zero` says what is sharded between uses.

    reduce: the type in which gradients travel between the devices. Their sums over microbatches are float32
    in either.
    """
    return Replicate(
        at=given_filter("replicate", at),
        devices=given_devices("replicate", devices),
        zero=zero,
        bucket_mb=bucket_mb,
        reduce_stream=given_stream("replicate", "reduce_stream", reduce_stream),
        gather_stream=given_stream("replicate", "gather_stream", gather_stream),
        reduce=None if reduce == "fp32" else reduce,
    )
