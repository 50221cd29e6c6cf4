"""`replicate`: the same parameters on several devices, kept equal."""

from dataclasses import dataclass, replace

from piper.directives.base import POSITIVE_SIZE, PlacingDirective, argument, one_of, registered, whole
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.node import Compute

ZERO = one_of(0, 1, 2, 3)
ZERO_LEVELS = "0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too"
FLAGS = {"shard_optimizer": 1, "shard_grads": 2, "shard_params": 3}  # what JSON says for a level


@registered(1)
@dataclass(frozen=True, slots=True, repr=False)
class Replicate(PlacingDirective):
    """Keep the selected chunks' parameters equal on `devices`; `zero` says what is sharded between uses.

    reduce: the type in which gradients travel between the devices. Their sums over microbatches are float32
    in either.
    keep: how long parameters stay gathered (zero 3) and gradients whole (zero 2, 3): for one "use", or for
    the "step", which communicates once for all microbatches and takes the memory.
    within: shard inside groups of so many neighbouring devices, which hold the same; the sums of gradients
    are then summed across the groups, shard by shard. Without it all devices are one group.
    optimizer_within: the optimizer's state is sharded inside groups of so many devices, which hold several of
    `within`; it may be all of them. Each device then updates a part of its shard.

    B[PP=0] @0
    -->
    B[PP=0] @0,2 --> reduce over 0,2 --> update
    """

    zero: int = argument(ZERO, default=0, hint=ZERO_LEVELS, flags=FLAGS)
    bucket_mb: float | None = argument(
        POSITIVE_SIZE, default=None, hint="leave it out for one bucket per chunk", key="bucket_size"
    )
    reduce_stream: str | None = None
    gather_stream: str | None = None
    reduce: str = argument(
        one_of("fp32", "bf16"), default="fp32", hint='gradients travel in it; "bf16" is half the bytes'
    )
    keep: str = argument(
        one_of("use", "step"), default="use", hint="how long gathered parameters and whole gradients stay"
    )
    within: int | None = argument(
        whole(2), default=None, hint="so many neighbouring devices form a group; leave it out for one group"
    )
    optimizer_within: int | None = argument(
        whole(2), default=None, hint="so many devices share the optimizer's state; leave it out for `within`"
    )

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        beyond = self.optimizer_within is not None and (self.within is None or self.zero != 3)
        if beyond or (self.within is not None and not self.zero):
            raise ScheduleError(
                "within= shards under ZeRO, and optimizer_within= beyond it under zero=3",
                facts={
                    "asked": f"zero={self.zero}, within={self.within}",
                    "optimizer_within": str(self.optimizer_within),
                },
                hint="ask for zero=3 and both, for zero=1 or 2 and within, or leave them out",
            )
        return graph.with_policies(
            nodes,
            lambda _, policy: replace(
                policy,
                zero=self.zero,
                within=self.within,
                optimizer_within=self.optimizer_within,
                bucket_mb=self.bucket_mb,
                reduce=self.reduce,
                keep=self.keep == "step",
                reduce_stream=self.reduce_stream or "reduce",
                gather_stream=self.gather_stream or "gather",
                ways=1,  # a later replicate wins over an earlier shard
                by_expert={},
                origin=number,
            ),
        )


replicate = Replicate
