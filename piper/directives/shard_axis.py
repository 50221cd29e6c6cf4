"""`shard` over an axis: tensor, sequence and context parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper.directives.arguments import argument, one_of, whole
from piper.directives.base import PlacingDirective, group_size, registered, source_line
from piper.errors import ScheduleError
from piper.ir.chunk_options import AxisPolicy, Policy
from piper.ir.graph import Graph
from piper.ir.node import Compute
from piper.ir.numbers import is_whole
from piper.ir.sharding import Shard

ATTENTION = one_of("gather", "heads", "ring")


@registered(2, key="axis")
@dataclass(frozen=True, slots=True, repr=False)
class ShardAxis(PlacingDirective):
    """Shard the work of the selected regions over each group of `ways` neighbouring devices.

    F[PP=0] @0
    -->
    F[PP=0] @0,1, all-reduce, F[PP=0 #1] @0,1 ...      (each device holds a slice of the named parameters)

    Groups of one device shard nothing: the directive then only places the regions.
    """

    axis: str
    ways: int | None = None
    weights: tuple[tuple[str, int], ...] = ()
    batch: tuple[tuple[str, int], ...] = ()
    between: int | None = argument(
        whole(1), default=None, hint="between=1 shards the sequence; 0 is the samples"
    )
    attention: str = argument(ATTENTION, default="gather", hint="each shards attention in another way")
    balance: str | None = argument(one_of("zigzag"), default=None, hint="leave it out for slices in order")
    stream: str | None = None

    @property
    def verb(self) -> str:
        return "shard"

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        by = self.title(number)
        self._check_words(by)
        if any(self.axis in dict(chunk.tags) for chunk in graph.outline.chunks if chunk.kind != "collective"):
            raise ScheduleError(
                f"{self.axis!r} is a tag of the model already",
                by=by,
                facts={"asked": f"axis={self.axis!r}"},
                hint="collectives carry the axis as a tag: name an axis that no annotation uses",
            )
        ways = group_size(self.ways, self.devices, by)
        own = AxisPolicy(
            axis=self.axis,
            degree=ways,
            stream=self.stream or self.axis.lower(),
            origin=number,
            fields={n: Shard(dim, zigzag=self.balance == "zigzag") for n, dim in self.batch},
            between=self.between is not None,
        )

        def sharded(_: str, policy: Policy) -> Policy:
            others = tuple(held for held in policy.axes if held.axis != self.axis)
            return replace(policy, axes=(*others, own) if ways > 1 else others)

        return graph.with_policies(nodes, sharded)

    def _check_words(self, by: str) -> None:
        """Refuse arguments that fit no model."""
        if not isinstance(self.axis, str) or not self.axis.isidentifier() or self.axis == "PASS":
            raise ScheduleError(
                f"axis={self.axis!r} is not a name", by=by, hint='name the axis in one word: axis="TP"'
            )
        if not self.weights and not self.batch:
            raise ScheduleError(
                f"axis={self.axis!r} shards nothing",
                by=by,
                hint="tensor parallelism needs weights={...}, context parallelism batch={...}",
            )


def given_dims(key: str, given: object) -> tuple[tuple[str, int], ...]:
    """Return the names and dimensions that a directive is given as a dict."""
    by = f"shard ({source_line()})"
    if not isinstance(given, Mapping):
        hint = f'write {key}={{"name": dimension}}'
        raise ScheduleError(f"{key}={given!r} is not a dict", by=by, hint=hint)
    for name, dim in given.items():
        if not isinstance(name, str) or not is_whole(dim, 0):
            hint = "give each name a dimension from 0"
            raise ScheduleError(f"{key} has {name!r}: {dim!r}", by=by, hint=hint)
    return tuple(given.items())
