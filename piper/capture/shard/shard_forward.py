"""Turns a recorded forward into that of one device of a group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from piper.capture.shard.axis_sharding import AxisSharding
from piper.capture.shard.layout import CopiedShard
from piper.capture.shard.reshapes import RESHAPES, value_of
from piper.capture.shard.rules import rule_of, rules
from piper.capture.shard.shape_rules import heads_of, number
from piper.capture.shard.sharder import Sharder, aten
from piper.capture.trace.cut import find_regions
from piper.capture.trace.effects import argument
from piper.capture.trace.functionalize import simplify
from piper.capture.trace.recording import FromParameter, Origin, Recording
from piper.errors import CaptureError
from piper.ir.chunk import Tags
from piper.ir.sharding import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedForward:
    """The forward of one device of a group, and what became of the parameters."""

    recording: Recording
    sharding: AxisSharding
    summed: frozenset[str]  # whole parameters whose gradient is a sum over the group


def shard_forward(
    recording: Recording,
    sharding: AxisSharding,
    inside: Callable[[Tags], bool],
    peers: Callable[[Tags, Tags], bool],
) -> ShardedForward:
    """Shard a forward in ATen operations over the devices of a group.

    inside: whether a region is sharded. peers: whether two regions' devices hold the same slices.
    """
    sharding = replace(sharding, weights=_with_biases(recording, sharding.weights, sharding.degree))
    regions = find_regions(recording, simplify(recording))
    region_of: Mapping[fx.Node, Tags] = regions.region_of
    sharding = _with_shared(recording, sharding, region_of, inside)
    marked: frozenset[str] = frozenset()
    while True:
        sharder = Sharder(recording, sharding, rules(), rule_of, region_of.get, inside, peers, marked)
        try:
            sharder.run()
        except CaptureError:
            if sharding.between is None or sharding.batch or sharding.gathers_rows:
                raise
            sharding = replace(sharding, gathers_rows=True)
            continue
        mixed = (sharder.summed & sharder.same) - marked
        if not mixed:
            break
        marked |= mixed  # used both ways: its sharded uses go through a collective
    origins: dict[fx.Node, Origin] = {
        sharder.local[node]: origin for node, origin in recording.origins.items()
    }
    origins |= {local: recording.origins[node] for node, local in sharder.unsharded.items()}
    origins |= {node: place for place, node in sharder.ranks.items()}
    own = replace(
        recording,
        graph=sharder.graph,
        origins=origins,
        results=tuple(sharder.local[result] for result in recording.results),
        tags={node: sharder.tags.get(node, ()) for node in sharder.graph.nodes},
        modes=sharder.modes,
        bundles=sharder.bundles,
    )
    return ShardedForward(recording=own, sharding=sharding, summed=frozenset(sharder.summed))


def _with_shared(
    recording: Recording,
    sharding: AxisSharding,
    region_of: Mapping[fx.Node, Tags],
    inside: Callable[[Tags], bool],
) -> AxisSharding:
    """Keep the weights whole that regions read which this directive does not shard: tied ones."""
    shared = {
        origin.name
        for node, origin in recording.origins.items()
        if isinstance(origin, FromParameter)
        and any(user in region_of and not inside(region_of[user]) for user in node.users)
    }
    weights = sharding.weights.items()
    return replace(
        sharding,
        weights={name: shard for name, shard in weights if name not in shared},
        shared={name: shard for name, shard in weights if name in shared},
    )


PRODUCTS = {
    aten.linear.default: (1, 0, 2),
    aten.addmm.default: (2, 1, 0),
    torch.ops.piper.head_sums.default: (1, 0, 2),
}  # weight, its dimension of outputs, bias
SPLITS = frozenset((aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default))


def _with_biases(recording: Recording, weights: Mapping[str, Shard], degree: int) -> dict[str, Shard]:
    """Shard a bias as the outputs of its weight.

    A weight whose outputs are split right away is sharded by blocks: query, key and value each by itself. One
    whose outputs are fewer heads than devices is sharded by heads, each on several devices.
    """
    names = {
        node: origin.name for node, origin in recording.origins.items() if isinstance(origin, FromParameter)
    }
    shards = dict(weights)
    for node in recording.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        weight, outputs, bias = PRODUCTS[node.target]
        given = names.get(node.args[weight])
        shard = weights.get(given) if given is not None else None
        if given is None or shard is None or shard.dim != outputs:
            continue
        copies, own = _copies(node, degree), Shard(outputs, _blocks(node))
        shards[given] = CopiedShard(outputs, copies=copies) if copies > 1 else own
        added = names.get(node.args[bias]) if len(node.args) > bias else None
        if added is not None:
            shards[added] = shards[given].at(0)
    return shards


def _copies(node: fx.Node, degree: int) -> int:
    """Return how many devices hold each head that the outputs of a product become, if these are fewer."""
    given = value_of(node)
    for user in node.users if isinstance(given, Tensor) else ():
        result = value_of(user)
        if user.target in RESHAPES and isinstance(result, Tensor) and isinstance(given, Tensor):
            heads = heads_of(tuple(given.shape), tuple(result.shape), Shard(given.dim() - 1))
            if 0 < heads < degree and degree % heads == 0:
                return degree // heads
    return 1


def _blocks(node: fx.Node) -> int:
    """Return into how many equal parts the last dimension of a product is split."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        result, given = value_of(user), value_of(node)
        if user.target in SPLITS:
            assert isinstance(result, tuple | list)
            last = result[0].dim() - 1
            dim = number(argument(user, "dim"))
            sizes = {int(part.shape[last]) for part in result}
            return len(result) if dim % (last + 1) == last and len(sizes) == 1 else 1
        if user.target is aten.glu.default and isinstance(given, Tensor):
            return 2 if number(argument(user, "dim")) in (-1, given.dim() - 1) else 1
        if user.target not in RESHAPES or not isinstance(result, Tensor) or not isinstance(given, Tensor):
            return 1
        if not result.dim() or result.shape[-1] != given.shape[-1]:
            return 1
        node = user
    return 1
