"""What `shard` over an axis asks of a captured model, and the model as one device then computes it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import fx

from piper.capture.shard.aten import as_aten
from piper.capture.shard.axis_sharding import AxisSharding, Request
from piper.capture.shard.layout import RESHAPES, CopiedShard, divides, tensor_of, value_of
from piper.capture.shard.rules import rule_of
from piper.capture.shard.shape_rules import heads_of, number
from piper.capture.shard.sharder import Sharder, aten
from piper.capture.trace.cut import find_regions
from piper.capture.trace.effects import argument
from piper.capture.trace.functionalize import simplify
from piper.capture.trace.graph_walks import reached
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import FromParameter, Recording
from piper.capture.trace.trace import Traced, cut_model
from piper.errors import CaptureError, ScheduleError
from piper.ir.chunk import Parameter, Tags, TensorSpec
from piper.ir.mesh import copies_along
from piper.ir.sharding import REPLICATE, AxisPlacement, Shard

PRODUCTS = {
    aten.linear.default: (1, 0, 2),
    aten.addmm.default: (2, 1, 0),
    torch.ops.piper.head_sums.default: (1, 0, 2),
}  # weight, its dimension of outputs, bias
SPLITS = frozenset((aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default))


def shard_model(
    recording: Recording,
    requests: Sequence[Request],
    parameters: Sequence[Parameter],
    batch: Mapping[str, TensorSpec],
    *,
    exact: bool = False,
) -> tuple[Recording, Sequence[Parameter]]:
    """Shard a model by one axis after another; the first directive's groups are innermost.

    Return it as one device computes it, and its parameters with how each is sharded. exact: the model
    computes in fp64, and casts to float32 inside it are dropped. Sums in another order then differ by
    rounding of fp64 alone.
    """
    recording = as_aten(recording, exact=exact)
    # The outermost axis first: what it leaves of a dimension is what an inner axis then shards.
    waiting = merged(requests)
    while waiting:
        request = waiting.pop()
        shared = [other for other in waiting if request.regions.keys() & other.regions.keys()]
        inner = math.prod({other.axis: other.degree for other in shared}.values())
        recording, parameters = _sharded_once(recording, request, parameters, batch, inner)
    return recording, parameters


def merged(requests: Sequence[Request]) -> list[Request]:
    """Return one request for all that shard alike: where stages begin does not change a sharding.

    Two stay apart where a region has axes between theirs: each region's axes keep their order.
    """
    distinct: list[Request] = []
    for request in (each for asked in requests for each in asked.by_axes()):
        for place, other in enumerate(distinct):
            between = [each for each in distinct[place:] if each.regions.keys() & request.regions.keys()]
            if other.alike(request) and not between:
                distinct[place] = replace(other, regions={**other.regions, **request.regions})
                break
        else:
            distinct.append(request)
    return distinct


def _sharded_once(
    recording: Recording,
    request: Request,
    parameters: Sequence[Parameter],
    batch: Mapping[str, TensorSpec],
    inner: int,
) -> tuple[Recording, list[Parameter]]:
    region_of = regions_of(recording)
    used = _parameters_of(recording, region_of, request.regions)
    weights = _weights(request, parameters, used)
    _check_fields(request, batch)
    sharding = AxisSharding(
        request=request,
        weights=weights,
        batch=request.fields,
        inner=inner,
    )
    sharder = shard_forward(recording, sharding, region_of)
    _check_gradients(request, [each for each in parameters if each.name in used], sharder.summed)
    shards = sharder.sharding.weights
    copied = {name for name, shard in shards.items() if isinstance(shard, CopiedShard)}
    for node in sharder.graph.nodes:
        if node.meta.get(WEIGHT) in copied:  # each device has a term of its gradient, which is not rounded
            node.meta = {key: value for key, value in node.meta.items() if key != WEIGHT}
    placed = []
    for each in parameters:
        if each.name in used:
            along = _along(request, shards.get(each.name), each.name in sharder.summed)
            each = replace(each, placements=(*along, *each.placements))
        placed.append(each)
    return sharder.recorded(), placed


def _along(request: Request, shard: Shard | None, partial: bool) -> tuple[AxisPlacement, ...]:
    """Return how a parameter lies along an axis, or along the two that it is split into."""
    axis, degree = request.axis, request.degree
    if not isinstance(shard, CopiedShard):
        return (AxisPlacement(axis=axis, degree=degree, placement=shard or REPLICATE, partial=partial),)
    own = AxisPlacement(axis=axis, degree=degree // shard.copies, placement=Shard(shard.dim))
    return AxisPlacement(axis=copies_along(axis), degree=shard.copies, partial=True), own


def _check_gradients(request: Request, parameters: Iterable[Parameter], summed: Collection[str]) -> None:
    """Refuse a tied parameter whose gradient is a sum along an axis in one region and whole in another."""
    for parameter in parameters:
        for held in parameter.placements:
            if held.axis == request.axis and held.partial != (parameter.name in summed):
                raise ScheduleError(
                    f"the gradient of the tied parameter {parameter.name} is a sum along {held.axis} in one "
                    "region and whole in another",
                    by=request.by,
                    facts={"degrees": f"{held.degree} and {request.degree}"},
                    hint="name it in weights= in each such region, in a shard before any with batch=",
                )


def regions_of(recording: Recording) -> Mapping[fx.Node, Tags]:
    """Return the region of each operation that is in one."""
    return find_regions(recording, simplify(recording)).region_of


def _parameters_of(
    recording: Recording, region_of: Mapping[fx.Node, Tags], regions: Collection[Tags]
) -> set[str]:
    """Return the parameters that the operations of some regions read."""

    def readers(node: fx.Node) -> Iterable[fx.Node]:
        return () if node in region_of else node.users

    names = parameter_names(recording).items()
    return {
        name for node, name in names if any(region_of.get(x) in regions for x in reached([node], readers))
    }


def _weights(request: Request, parameters: Sequence[Parameter], used: set[str]) -> dict[str, Shard]:
    """Return which parameters are sharded along which dimension. A module's name stands for its weight."""
    weights: dict[str, Shard] = {}
    known = {name: parameter for parameter in parameters for name in (parameter.name, *parameter.aliases)}
    for patterns, dim in request.weights.items():
        for pattern in patterns.split("|"):
            matched = [n for n in known if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.weight")]
            if not matched:
                close = get_close_matches(f"{pattern}.weight", known, n=1, cutoff=0.3)
                raise ScheduleError(
                    f"{pattern!r} names no module with a weight and no parameter",
                    by=request.by,
                    facts={"parameters": ", ".join(list(known)[:6]) + (" ..." if len(known) > 6 else "")},
                    hint=f"did you mean {close[0].removesuffix('.weight')!r}?"
                    if close
                    else "check the pattern",
                )
            for name in matched:
                parameter = known[name]
                _check_weight(request, parameter, dim)
                if parameter.name in used:
                    weights[parameter.name] = Shard(dim)
    return weights


def _check_weight(request: Request, parameter: Parameter, dim: int) -> None:
    shape = parameter.local_shape
    if not 0 <= dim < len(shape) or not divides(shape[dim], Shard(dim), request.degree):
        raise ScheduleError(
            f"{parameter.name} cannot be sharded along dimension {dim}",
            by=request.by,
            facts={"shape": str(list(shape)), "asked": f"ways={request.degree}"},
            hint=f"choose a dimension from 0 to {len(shape) - 1}, and `ways` among the divisors of its size",
        )


def _check_fields(request: Request, batch: Mapping[str, TensorSpec]) -> None:
    for name, layout in request.fields.items():
        shape, dim = batch[name].shape if name in batch else (), layout.dim
        if not 1 <= dim < len(shape) or not divides(shape[dim], layout, request.degree):
            fields = ", ".join(f"{field} {list(spec.shape)}" for field, spec in batch.items())
            slices = request.degree * (2 if request.zigzag else 1)
            raise ScheduleError(
                f"the batch has no field {name!r} that can be sharded along dimension {dim}",
                by=request.by,
                facts={"fields": fields, "slices": str(slices)},
                hint="name fields that hold one entry for each position of the sequence, with a dimension "
                "after that of the samples whose size divides by the slices",
            )


def sharded(traced: Traced, requests: Sequence[Request]) -> Traced:
    """Return the model as one device of its groups computes it, cut into chunks and collectives."""
    before = traced.outline
    recording, parameters = shard_model(
        traced.recording, requests, before.parameters, before.batch, exact=traced.exact
    )
    degrees: dict[Tags, int] = {}  # how many devices share the same samples
    for request in requests:
        for tags in request.regions:
            degrees[tags] = degrees.get(tags, 1) * request.degree
    cut, pieces = cut_model(recording)
    outline = replace(
        before,
        chunks=cut.chunks,
        loss=cut.loss,
        weight=cut.weight,
        metrics=cut.metrics,
        parameters=tuple(parameters),
        degrees=degrees,
    )
    return replace(traced, outline=outline, pieces=pieces, recording=recording)


def shard_forward(recording: Recording, sharding: AxisSharding, region_of: Mapping[fx.Node, Tags]) -> Sharder:
    """Shard a forward in ATen operations over the devices of a group."""
    sharding = replace(sharding, weights=_with_biases(recording, sharding.weights, sharding.request.degree))
    sharding = _with_shared(recording, sharding, region_of)
    marked: frozenset[str] = frozenset()
    while True:
        sharder = Sharder(recording, sharding, rule_of, region_of.get, marked)
        try:
            sharder.run()
        except CaptureError:
            if sharding.request.between is None or sharding.batch or sharding.gathers_rows:
                raise
            sharding = replace(sharding, gathers_rows=True)
            continue
        mixed = (sharder.summed & sharder.same) - marked
        if not mixed:
            break
        marked |= mixed  # used both ways: its sharded uses go through a collective
    return sharder


def parameter_names(recording: Recording) -> dict[fx.Node, str]:
    """Return the parameters among the inputs of a recording."""
    origins = recording.origins.items()
    return {node: origin.name for node, origin in origins if isinstance(origin, FromParameter)}


def _with_shared(
    recording: Recording, sharding: AxisSharding, region_of: Mapping[fx.Node, Tags]
) -> AxisSharding:
    """Keep the weights whole that regions read which this directive does not shard: tied ones."""
    shared = {
        name
        for node, name in parameter_names(recording).items()
        if any(user in region_of and region_of[user] not in sharding.request.regions for user in node.users)
    }
    weights = sharding.weights.items()
    return replace(
        sharding,
        weights={name: shard for name, shard in weights if name not in shared},
        shared={name: shard for name, shard in weights if name in shared},
    )


def _with_biases(recording: Recording, weights: Mapping[str, Shard], degree: int) -> dict[str, Shard]:
    """Shard a bias as the outputs of its weight.

    A weight whose outputs are split right away is sharded by blocks: query, key and value each by itself. One
    whose outputs are fewer heads than devices is sharded by heads, each on several devices.
    """
    names, shards = parameter_names(recording), dict(weights)
    for node in recording.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        weight, outputs, bias = PRODUCTS[node.target]
        given = names.get(node.args[weight], "")
        if given not in weights or weights[given].dim != outputs:
            continue
        copies, own = _copies(node, degree), Shard(outputs, _blocks(node))
        shards[given] = CopiedShard(outputs, copies=copies) if copies > 1 else own
        if len(node.args) > bias and (added := names.get(node.args[bias])) is not None:
            shards[added] = shards[given].at(0)
    return shards


def _copies(node: fx.Node, degree: int) -> int:
    """Return how many devices hold each head that the outputs of a product become, if these are fewer."""
    for user in node.users:
        if user.target in RESHAPES:
            given, result = (tuple(tensor_of(x).shape) for x in (node, user))
            heads = heads_of(given, result, Shard(len(given) - 1))
            if 0 < heads < degree and degree % heads == 0:
                return degree // heads
    return 1


def _blocks(node: fx.Node) -> int:
    """Return into how many equal parts the last dimension of a product is split."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in SPLITS or user.target is aten.glu.default:
            last, parts = tensor_of(node).dim() - 1, value_of(user)
            halves = [0, 0]  # of a gate: they are equal
            sizes = [int(part.shape[last]) for part in parts] if isinstance(parts, tuple | list) else halves
            return len(sizes) if number(argument(user, "dim")) in (-1, last) and len({*sizes}) == 1 else 1
        if user.target not in RESHAPES or tensor_of(user).shape[-1:] != tensor_of(node).shape[-1:]:
            return 1
        node = user
    return 1
