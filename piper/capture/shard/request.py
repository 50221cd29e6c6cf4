"""What `shard` over an axis asks of a captured model, and the model as one device then computes it."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import fx

from piper.capture.shard.aten import as_aten
from piper.capture.shard.axis_sharding import AxisSharding
from piper.capture.shard.layout import CopiedShard, divides
from piper.capture.shard.shard_forward import shard_forward
from piper.capture.trace.cut import find_regions
from piper.capture.trace.functionalize import simplify
from piper.capture.trace.linear_layers import WEIGHT
from piper.capture.trace.recording import FromParameter, Recording
from piper.capture.trace.trace import Traced, cut_model
from piper.errors import ScheduleError
from piper.ir.chunk import Parameter, Tags, TensorSpec
from piper.ir.mesh import Axis, Mesh, copies_along
from piper.ir.sharding import REPLICATE, AxisPlacement, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One directive, and the regions that it shards."""

    by: str
    axis: str
    degree: int
    weights: Mapping[str, int]  # patterns of modules or parameters, and the dimension that is sharded
    batch: Mapping[str, int]
    between: int | None
    attention: str
    zigzag: bool
    regions: Mapping[Tags, Mesh]  # each with its devices, numbered from 0: shards pass between equal ones

    def alike(self, other: "Request") -> bool:
        """Return whether two directives shard alike, so that slices may pass between their regions."""
        asked = replace(self, by="", regions={}) == replace(other, by="", regions={})
        return asked and self.axes == other.axes

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes of the first region: the same for all of a request that `by_axes` returns."""
        return next(iter(self.regions.values())).sharing

    def by_axes(self) -> Iterator["Request"]:
        """Yield a request for all regions that have the same axes: slices pass between no others."""
        for axes in dict.fromkeys(mesh.sharing for mesh in self.regions.values()):
            yield replace(self, regions={tags: m for tags, m in self.regions.items() if m.sharing == axes})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """A model as one device of its groups computes it."""

    recording: Recording
    parameters: tuple[Parameter, ...]  # with how each is sharded


def shard_model(
    recording: Recording,
    requests: Sequence[Request],
    parameters: Sequence[Parameter],
    batch: Mapping[str, TensorSpec],
    *,
    exact: bool = False,
) -> ShardedModel:
    """Shard a model by one axis after another; the first directive's groups are innermost.

    exact: the model computes in fp64, and casts to float32 inside it are dropped. Sums in another order then
    differ by rounding of fp64 alone.
    """
    recording = as_aten(recording, exact=exact)
    # The outermost axis first: what it leaves of a dimension is what an inner axis then shards.
    waiting = merged(requests)
    while waiting:
        request = waiting.pop()
        shared = [other for other in waiting if request.regions.keys() & other.regions.keys()]
        inner = math.prod({other.axis: other.degree for other in shared}.values())
        recording, parameters = _sharded_once(recording, request, parameters, batch, inner)
    return ShardedModel(recording=recording, parameters=tuple(parameters))


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
) -> tuple[Recording, tuple[Parameter, ...]]:
    meshes = request.regions
    used = _parameters_of(recording, meshes)
    weights = _weights(request, parameters, used)
    _check_fields(request, batch)
    sharding = AxisSharding(
        by=request.by,
        axis=request.axis,
        degree=request.degree,
        weights=weights,
        batch={name: Shard(dim, zigzag=request.zigzag) for name, dim in request.batch.items()},
        between=request.between,
        attention=request.attention,
        zigzag=request.zigzag,
        inner=inner,
    )

    def peers(a: Tags, b: Tags) -> bool:
        return a in meshes and b in meshes and meshes[a] == meshes[b]

    forward = shard_forward(recording, sharding, meshes.__contains__, peers)
    _check_gradients(request, [each for each in parameters if each.name in used], forward.summed)
    shards = forward.sharding.weights
    copied = {name for name, shard in shards.items() if isinstance(shard, CopiedShard)}
    for node in forward.recording.graph.nodes:
        if node.meta.get(WEIGHT) in copied:  # each device has a term of its gradient, which is not rounded
            node.meta = {key: value for key, value in node.meta.items() if key != WEIGHT}
    sharded = tuple(
        replace(
            parameter,
            placements=(
                *_along(request, shards.get(parameter.name), parameter.name in forward.summed),
                *parameter.placements,
            ),
        )
        if parameter.name in used
        else parameter
        for parameter in parameters
    )
    return forward.recording, sharded


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


def _parameters_of(recording: Recording, regions: Iterable[Tags]) -> set[str]:
    """Return the parameters that the operations of some regions read."""
    inside = set(regions)
    region_of = find_regions(recording, simplify(recording)).region_of
    names = {
        node: origin.name for node, origin in recording.origins.items() if isinstance(origin, FromParameter)
    }

    def reads(node: fx.Node) -> bool:
        return any(
            region_of.get(user) in inside or (user not in region_of and reads(user)) for user in node.users
        )

    return {name for node, name in names.items() if reads(node)}


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
    if not 0 <= dim < len(shape):
        raise ScheduleError(
            f"{parameter.name} has no dimension {dim}",
            by=request.by,
            facts={"shape": str(list(shape))},
            hint=f"choose a dimension from 0 to {len(shape) - 1}",
        )
    if not divides(shape[dim], Shard(dim), request.degree):
        raise ScheduleError(
            f"dimension {dim} of {parameter.name} does not divide by {request.degree}",
            by=request.by,
            facts={"shape": str(list(shape)), "asked": f"ways={request.degree}"},
            hint="choose `ways` among the divisors of that size",
        )


def _check_fields(request: Request, batch: Mapping[str, TensorSpec]) -> None:
    for name, dim in request.batch.items():
        if name not in batch:
            raise ScheduleError(
                f"the batch has no field {name!r}",
                by=request.by,
                facts={"fields": ", ".join(batch)},
                hint="name the fields that hold one entry for each position of the sequence",
            )
        shape = batch[name].shape
        layout = Shard(dim, zigzag=request.zigzag)
        if not 1 <= dim < len(shape) or not divides(shape[dim], layout, request.degree):
            slices = request.degree * (2 if request.zigzag else 1)
            raise ScheduleError(
                f"the field {name!r} cannot be sharded along dimension {dim}",
                by=request.by,
                facts={"shape": str(list(shape)), "slices": str(slices)},
                hint="dimension 0 is the samples; choose a later one whose size divides by the slices",
            )


def sharded(traced: Traced, requests: Sequence[Request]) -> Traced:
    """Return the model as one device of its groups computes it, cut into chunks and collectives."""
    sharded_model = shard_model(
        traced.recording, requests, traced.outline.parameters, traced.outline.batch, exact=traced.exact
    )
    cut, pieces = cut_model(sharded_model.recording)
    outline = replace(
        traced.outline,
        chunks=cut.chunks,
        loss=cut.loss,
        weight=cut.weight,
        metrics=cut.metrics,
        parameters=sharded_model.parameters,
        degrees=degrees_of(requests),
    )
    return replace(traced, outline=outline, pieces=pieces, recording=sharded_model.recording)


def degrees_of(requests: Sequence[Request]) -> dict[Tags, int]:
    """Return how many devices share the same samples, for each region that is sharded."""
    degrees: dict[Tags, int] = {}
    for request in requests:
        for tags in request.regions:
            degrees[tags] = degrees.get(tags, 1) * request.degree
    return degrees
