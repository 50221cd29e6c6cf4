"""`shard`: experts sharded over devices; over an axis, tensor, sequence and context parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from piper.directives.base import (
    Directive,
    PlacingDirective,
    argument,
    group_size,
    one_of,
    registered,
    source_line,
    whole,
)
from piper.errors import ScheduleError
from piper.ir.chunk import ROUTED, Chunk, Output
from piper.ir.chunk_options import AxisPolicy, Policy
from piper.ir.graph import Graph
from piper.ir.mesh import EXPERTS
from piper.ir.node import Compute
from piper.ir.numbers import is_number, is_whole
from piper.ir.select import At
from piper.ir.sharding import AxisPlacement
from piper.ir.sharding import Shard as ShardDim

ATTENTION = one_of("gather", "heads", "ring")


def given_dims(key: str, given: object) -> tuple[tuple[str, int], ...]:
    """Return the names and dimensions that a directive is given as a dict, as pairs."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(isinstance(one, tuple) and len(one) == 2 for one in pairs):
        hint = f'write {key}={{"name": dimension}}'
        raise ScheduleError(f"{key}={given!r} is not a dict", hint=hint)
    for name, dim in pairs:
        if not isinstance(name, str) or not is_whole(dim, 0):
            raise ScheduleError(f"{key} has {name!r}: {dim!r}", hint="give each name a dimension from 0")
    return pairs


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
    weights: tuple[tuple[str, int], ...] = argument(default=(), given=given_dims)
    batch: tuple[tuple[str, int], ...] = argument(default=(), given=given_dims)
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
        self._check_words()
        if any(self.axis in dict(chunk.tags) for chunk in graph.outline.chunks if chunk.kind != "collective"):
            raise ScheduleError(
                f"{self.axis!r} is a tag of the model already",
                facts={"asked": f"axis={self.axis!r}"},
                hint="collectives carry the axis as a tag: name an axis that no annotation uses",
            )
        ways, zigzag = group_size(self.ways, self.devices), self.balance == "zigzag"
        own = AxisPolicy(
            axis=self.axis,
            degree=ways,
            stream=self.stream or self.axis.lower(),
            origin=number,
            weights=dict(self.weights),
            fields={name: ShardDim(dim, zigzag=zigzag) for name, dim in self.batch},
            between=self.between,
            attention=self.attention,
            zigzag=zigzag,
        )

        def sharded(_: str, policy: Policy) -> Policy:
            others = tuple(held for held in policy.axes if held.axis != self.axis)
            return replace(policy, axes=(*others, own) if ways > 1 else others)

        return graph.with_policies(nodes, sharded)

    def _check_words(self) -> None:
        """Refuse arguments that fit no model."""
        if not isinstance(self.axis, str) or not self.axis.isidentifier() or self.axis == "PASS":
            raise ScheduleError(
                f"axis={self.axis!r} is not a name", hint='name the axis in one word: axis="TP"'
            )
        if not self.weights and not self.batch:
            raise ScheduleError(
                f"axis={self.axis!r} shards nothing",
                hint="tensor parallelism needs weights={...}, context parallelism batch={...}",
            )


@registered(2)
@dataclass(frozen=True, slots=True, repr=False)
class Shard(PlacingDirective):
    """Shard the experts of the selected regions over each group of `ways` devices.

    route --> experts --> unroute
    -->
    counts, all-to-all --> experts / ways @group --> all-to-all back
    """

    ways: int | None = None
    clones: int = 0
    stream: str | None = None
    capacity: float | None = None

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        chunks = graph.chunks
        experts = [name for name in dict.fromkeys(n.chunk for n in nodes) if chunks[name].kind in ROUTED]
        if not experts:
            raise ScheduleError(
                "nothing here can be sharded by expert",
                facts={"asked": str(self.at), "but": f"{nodes[0].chunk} has no route ... unroute"},
                hint="call piper.route and piper.unroute inside the region, and select it by its tag",
            )
        ways = group_size(self.ways, self.devices, "expert group")
        if self.capacity is not None:
            self.check_capacity(ways)
        if self.clones:
            self.check_clones([chunks[name] for name in experts], ways)
        for name in experts:
            if chunks[name].experts % ways:
                raise ScheduleError(
                    f"{chunks[name].experts} experts do not divide by {ways}",
                    facts={"region": name, "asked": f"ways={ways}"},
                    hint="choose ways among the divisors of the number of experts",
                )
        return graph.with_policies(
            (node for node in nodes if chunks[node.chunk].kind in ROUTED),
            lambda name, policy: replace(
                policy,
                ways=ways,
                clones=self.clones,
                capacity=self.capacity,
                by_expert=by_expert(graph, chunks[name], ways),
                own_rows=chunks[route_of(chunks, name)].own_rows,
                exchange_stream=self.stream or "exchange",
                origin=number,
            ),
        )

    def check_capacity(self, ways: int) -> None:
        """Refuse room for fewer rows than even routing sends, or for more than there are."""
        if self.clones or not is_number(self.capacity) or not 1 <= self.capacity <= ways:
            raise ScheduleError(
                f"blocks of rows cannot have room for {self.capacity!r} even shares",
                facts={"ways": str(ways), **({"clones": str(self.clones)} if self.clones else {})},
                hint="capacity is from 1, for even routing, to ways, for any routing; without clones",
            )

    def check_clones(self, chunks: Sequence[Chunk], ways: int) -> None:
        """Refuse room for more experts than other devices have, and clones of experts with buffers."""
        for chunk in chunks:
            others = chunk.experts - chunk.experts // ways
            if not is_whole(self.clones, 0) or self.clones > others or chunk.buffers:
                buffers = {"buffers": ", ".join(chunk.buffers)} if chunk.buffers else {}
                raise ScheduleError(
                    f"a device cannot have {self.clones!r} clones of these experts",
                    facts={"region": chunk.name, "experts of other devices": str(others), **buffers},
                    hint="clones is from 0 to that number, of experts that have parameters only",
                )


def by_expert(graph: Graph, chunk: Chunk, ways: int) -> dict[str, AxisPlacement]:
    """Return how an expert chunk's state is sharded: along its first dimension, where that is the experts."""
    if chunk.kind != "expert" or ways == 1:
        return {}
    shapes = {param.name: param.shape for param in graph.outline.parameters}
    params = [name for name in chunk.params if shapes[name][:1] == (chunk.experts,)]
    placement = AxisPlacement(axis=EXPERTS, degree=ways, placement=ShardDim(dim=0))
    return dict.fromkeys((*params, *chunk.buffers), placement)


def route_of(chunks: Mapping[str, Chunk], name: str) -> str:
    """Return the route that gives a chunk of an expert region its rows."""
    while chunks[name].kind != "route":
        source = chunks[name].inputs[-1 if chunks[name].kind == "unroute" else 0]
        assert isinstance(source, Output), "rows of experts come from a route"
        name = source.chunk
    return name


def shard(
    at: At,
    devices: Sequence[int],
    ways: int | None = None,
    stream: str | None = None,
    *,
    clones: int = 0,
    capacity: float | None = None,
    axis: str | None = None,
    weights: Mapping[str, int] | None = None,
    batch: Mapping[str, int] | None = None,
    between: int | None = None,
    attention: str = "gather",
    balance: str | None = None,
) -> Directive:
    """Shard the selected regions over each group of `ways` devices; what they exchange uses `stream`.

    Without `axis` it shards the experts. clones: for how many experts of other devices each device has room,
    to take a part of their rows. capacity: the rows that travel from device to device, in shares of even
    routing, so that no host waits for their number. None: as many as are counted. With `axis`, `weights`
    (tensor parallelism) names parameters and the dimension along which each is sharded, and `batch` (context
    parallelism) names the fields that are sharded along the sequence. between: the dimension along which
    activations between regions are sharded too. attention: how a sharded sequence attends, "gather" or
    "heads". balance: "zigzag" gives each device an early and a late piece of the sequence.
    """
    along = axis is not None or bool(weights) or bool(batch)
    for_experts = {"clones": clones != 0, "capacity": capacity is not None}
    for_axes = {
        "between": between is not None,
        "attention": attention != "gather",
        "balance": balance is not None,
    }
    unused = [name for name, given in (for_experts if along else for_axes).items() if given]
    if unused:
        kind, other = ("along an axis", "by expert") if along else ("by expert", "along an axis")
        raise ScheduleError(
            f"{' and '.join(unused)} would be ignored: this shards {kind}",
            by=f"shard ({source_line()})",
            hint=f"leave it out, or give it to the shard {other}",
        )
    if along:
        return ShardAxis(
            at=at,
            devices=devices,
            axis=axis if axis is not None else ("TP" if weights else "CP"),
            ways=ways,
            weights=cast(Any, weights or {}),  # as pairs: see `given_dims`
            batch=cast(Any, batch or {}),
            between=between,
            attention=attention,
            balance=balance,
            stream=stream,
        )
    return Shard(at, devices, ways, clones, stream, capacity)
