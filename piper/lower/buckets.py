"""ProgramBuckets: which parameters live, travel and are updated together, and among which devices."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper.errors import ScheduleError
from piper.ir.chunk import Chunk, Parameter
from piper.ir.devices import Devices, interned, show
from piper.ir.dtypes import itemsize
from piper.ir.graph import Graph
from piper.ir.grouping import grouped
from piper.ir.ids import param_slot, state_slot
from piper.ir.mesh import EXPERTS, GROUPS, OWNERS, Axis, groups_along, groups_apart
from piper.ir.sharding import Shard, Sharding, local_sizes, refined, shardings_on
from piper.lower.placements import ChunkPlacement, clones_of, placements_of
from piper.lower.state import LoweringState
from piper.plan.bucket import Bucket
from piper.plan.plan import Slot
from piper.plan.updates import Piece

MEGABYTE = 2**20
SMALL = 2**18  # bytes of parameters whose gradients take about as long to sum as a single number


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBuckets:
    """The buckets of a program, by name, and why some of them are not sharded."""

    read: Mapping[str, Bucket]  # those that its chunks read
    held: Mapping[str, Bucket]  # and those that only the program that trains them reads
    why: tuple[str, ...] = ()


def make_buckets(graph: Graph) -> ProgramBuckets:
    """Group each chunk's parameters into buckets; a tied parameter gets buckets of its own.

    PP=0: a, b, tied     PP=1: c, tied
    -->
    PP=0/0: a, b     PP=1/0: c     tied@PP=0: tied     tied@PP=1: tied
    """
    placements = placements_of(graph)
    reached = graph.outline.reached  # what no backward reaches is not trained
    parameters = {
        p.name: replace(p, trainable=p.trainable and p.name in reached) for p in graph.outline.parameters
    }
    users = grouped((name, chunk.name) for chunk in graph.outline.chunks for name in chunk.params)
    read: dict[str, Bucket] = {}
    why: list[str] = []
    for chunk in graph.outline.chunks:
        own = [parameters[name] for name in chunk.params if len(users[name]) == 1]
        narrow = chunk.rowwise if graph.options[chunk.name].gather is not None else ()
        for bucket in chunk_buckets(chunk, own, placements[chunk.name], narrow):
            fp8 = bucket.zero == 3 and bucket.pieces[0].name in narrow
            read[bucket.name] = replace(bucket, gathered_as="fp8") if fp8 else bucket
    read = join_small(read, graph, placements)
    for name, chunks in users.items():
        if len(chunks) > 1:
            buckets, reason = tied_buckets(parameters[name], [placements[c] for c in chunks], read)
            read.update({bucket.name: bucket for bucket in buckets})
            why += reason
    return ProgramBuckets(read=read, held=read, why=tuple(why))


def join_small(
    buckets: Mapping[str, Bucket], graph: Graph, placements: Mapping[str, ChunkPlacement]
) -> dict[str, Bucket]:
    """Join small buckets whose gradients are partial sums along an axis: they are reduced at once.

    Under sequence parallelism each norm is a bucket of its own, between layers that are sharded. A reduction
    for each, beside the collectives of these layers, takes longer than what it sums. What is summed along one
    axis alone uses the stream of its collectives: a communicator of its own would have threads on every host
    that wait for the one reduction of a step.
    """
    partial = {p.name: {each.axis for each in p.placements if each.partial} for p in graph.outline.parameters}
    kinds: dict[object, list[Bucket]] = {}
    for bucket in buckets.values():
        reduced = bucket.trainable and not bucket.zero and bucket.group_size > 1
        alike: object = bucket.name
        whole = all(partial[piece.name] and not piece.shardings for piece in bucket.pieces)
        if reduced and whole and bucket.nbytes <= SMALL:
            for axis in placements[bucket.chunks[0]].policy.axes:
                alone = all(partial[piece.name] == {axis.axis} for piece in bucket.pieces)
                if alone and axis.degree == bucket.group_size:
                    bucket = replace(bucket, reduce_stream=axis.stream)
            options = graph.options[bucket.chunks[0]]
            kind = replace(bucket, name="", chunks=(), pieces=(), origin=())
            alike = kind, options.protect, options.offload_state
        kinds.setdefault(alike, []).append(bucket)
    return {members[0].name: joined(members) for members in kinds.values()}


def joined(buckets: Sequence[Bucket]) -> Bucket:
    """Return buckets that lie alike as one."""
    first, *others = buckets
    pieces = list(first.pieces)
    for piece in (piece for bucket in others for piece in bucket.pieces):
        pieces.append(replace(piece, offset=pieces[-1].offset + pieces[-1].numel))
    return replace(
        first,
        pieces=tuple(pieces),
        chunks=tuple(dict.fromkeys(chunk for bucket in buckets for chunk in bucket.chunks)),
        origin=tuple(dict.fromkeys(number for bucket in buckets for number in bucket.origin)),
    )


def hold_buckets(state: LoweringState) -> LoweringState:
    """Give each chunk the names of its buckets, and the program slots for what outlives a step.

    PP=0/0: a, b
    -->
    PP=0 reads PP=0/0; PP=0/0.param and PP=0/0.state outlive the step
    """
    read = grouped((chunk, name) for name, bucket in state.buckets.items() for chunk in bucket.chunks)
    chunk_buckets = {c.name: tuple(read.get(c.name, ())) for c in state.graph.outline.chunks}
    residents = dict(state.residents)
    away = state.graph.chosen(lambda options: options.offload_state)
    for name, bucket in {**state.buckets, **state.held_buckets}.items():
        if name in state.buckets:
            residents[param_slot(name)] = Slot(nbytes=state.buckets[name].held_nbytes)
        if bucket.trainable:
            nbytes = bucket.kept_nbytes(state.settings.state_bytes)
            on_host = not away.keys().isdisjoint(bucket.chunks)
            residents[state_slot(name)] = Slot(nbytes=0, host=nbytes) if on_host else Slot(nbytes=nbytes)
    return replace(state, chunk_buckets=chunk_buckets, residents=residents)


def every_parameter_has_a_bucket(state: LoweringState) -> Iterator[str]:
    """Yield each parameter that is not in exactly one of its chunk's buckets."""
    for chunk in state.graph.outline.chunks:
        bucketed = [p.name for b in state.chunk_buckets[chunk.name] for p in state.buckets[b].pieces]
        for name in chunk.params:
            if bucketed.count(name) != 1:
                yield f"{chunk.name} finds {name} in {bucketed.count(name)} of its buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """How the devices of a region hold one parameter between them, before ZeRO."""

    shape: tuple[int, ...]  # of what one device holds
    shardings: tuple[Sharding, ...] = ()
    distinct: tuple[Axis, ...] = ()  # along these, each device has a gradient of its own, and none is summed
    replicas: int = 1  # devices that hold the same slice and compute the same gradient
    inside: int = field(default=1, compare=False)  # devices over which ZeRO shards it
    across: tuple[Axis, ...] = ()  # along which groups of devices hold the same shards, and sum them
    owners: Axis | None = None  # along which they hold the same shards, and update a part each

    @property
    def slices(self) -> int:
        """Return into how many different slices the parameter is cut."""
        return math.prod(sharding.degree for sharding in self.shardings)


def held_by(param: Parameter, placement: ChunkPlacement) -> HeldParameter:
    """Return how the devices of a region hold a parameter: sharded by expert, along an axis, or whole."""
    placements = (*param.placements, *placement.policy.placements(param.name))
    mesh = refined(placement.mesh, placements)
    shardings = shardings_on(placement.mesh, placements)
    sharded = {each.axis for each in placements if isinstance(each.placement, Shard)}
    partial = {each.axis for each in placements if each.partial}
    replicas = [axis for axis in mesh.sharing if axis.name not in partial | sharded]
    distinct = tuple(axis for axis in mesh.axes if axis in replicas or axis.name in sharded)
    outer = {axis.name: axis for axis in mesh.axes if axis.name in (OWNERS, GROUPS)}
    inside = math.prod(axis.degree for axis in mesh.axes if axis not in (*distinct, *outer.values()))
    across = (outer[GROUPS],) if GROUPS in outer and inside > 1 else ()
    return HeldParameter(
        shape=local_sizes(param.shape, shardings),
        shardings=shardings,
        distinct=(*distinct, *across),
        replicas=math.prod(axis.degree for axis in (*replicas, *across)),
        inside=inside,
        across=across,
        owners=outer.get(OWNERS) if inside > 1 else None,
    )


def chunk_buckets(
    chunk: Chunk, params: Iterable[Parameter], placement: ChunkPlacement, narrow: Collection[str]
) -> Iterator[Bucket]:
    """Yield buckets of a chunk's own parameters, each at most `bucket_mb` large."""
    kinds: dict[tuple[object, ...], list[tuple[Parameter, HeldParameter]]] = {}
    for param in params:
        held = held_by(param, placement)
        sliced = tuple(sharding.axis for sharding in held.shardings)
        kind = (param.dtype, param.trainable, held.distinct, held.replicas, sliced, param.name in narrow)
        kinds.setdefault(kind, []).append((param, held))
    limit = placement.policy.bucket_mb
    number = 0
    for members in kinds.values():
        dtype, filled = members[0][0].dtype, 0
        pieces: list[Piece] = []
        for param, held in members:
            piece = Piece(name=param.name, shape=held.shape, offset=filled, shardings=held.shardings)
            if pieces and limit is not None and (filled + piece.numel) * itemsize(dtype) > limit * MEGABYTE:
                yield bucket_for(f"{chunk.name}/{number}", pieces, (placement,), *members[0])
                number, pieces, filled = number + 1, [], 0
                piece = replace(piece, offset=0)
            pieces.append(piece)
            filled += piece.numel
        yield bucket_for(f"{chunk.name}/{number}", pieces, (placement,), *members[0])
        number += 1


def bucket_for(
    name: str,
    pieces: list[Piece],
    placements: tuple[ChunkPlacement, ...],
    param: Parameter,
    held: HeldParameter,
) -> Bucket:
    """Return a bucket that lives on the devices of `placements`, which all have the same devices."""
    placement = placements[0]
    groups = groups_apart(placement.devices, held.distinct, held.owners)
    # float64 is never rounded.
    short = param.dtype != "float64" and all(each.policy.reduce == "bf16" for each in placements)
    zero = min(h.policy.zero for h in placements) if held.inside > 1 else 0
    inside: tuple[Devices, ...] = ()
    if clones := clones_of(placements):  # what chunks read exists for a step only, as under ZeRO-3
        zero, inside = 3, placement.mesh.by_expert.groups(EXPERTS)
    elif held.owners and zero == 3:
        inside = groups_apart(placement.devices, (*held.distinct, held.owners))
    return Bucket(
        name=name,
        pieces=tuple(pieces),
        devices=placement.devices,
        groups=groups,
        inside=inside,
        across=groups_along(placement.devices, held.across) if held.across else (),
        chunks=tuple(h.chunk for h in placements),
        dtype=param.dtype,
        itemsize=itemsize(param.dtype),
        zero=zero,
        trainable=param.trainable,
        copies=(1 if zero else len(groups[0])) * held.replicas,
        reduced_as="bfloat16" if short and param.trainable else "",
        keep=bool(clones) or all(h.policy.keep for h in placements),
        clones=clones,
        reduce_stream=placement.policy.reduce_stream,
        gather_stream=placement.policy.gather_stream,
        origin=tuple(dict.fromkeys(n for h in placements for n in h.origin)),
    )


def tied_buckets(
    param: Parameter, placements: list[ChunkPlacement], taken: Collection[str]
) -> tuple[list[Bucket], list[str]]:
    """Return the buckets of a parameter that several chunks use: one per set of devices, or one over all."""
    why: list[str] = []
    if len({(each.policy.within, each.policy.optimizer_within) for each in placements}) > 1:
        placements = [unsharded(placement) for placement in placements]
        why = [f"{param.name}: not sharded, because its chunks ask for ZeRO inside different groups"]
    held = held_by(param, unsharded(placements[0]))
    ordered = bool(held.distinct) or placements[0].policy.within is not None
    by_set: dict[Devices, list[ChunkPlacement]] = {}
    for placement in placements:  # in another order it is another set where positions decide slices
        devices = placement.devices if ordered else interned(tuple(sorted(placement.devices)))
        by_set.setdefault(devices, []).append(placement)
    check_sharded_alike(param, placements, several=len(by_set) > 1)
    piece = Piece(name=param.name, shape=held.shape, offset=0, shardings=held.shardings)
    named, chunks = param.name, [placement.chunk for placement in placements]
    while not {named, *(f"{named}@{chunk}" for chunk in chunks)}.isdisjoint(taken):
        named += "'"  # another bucket has that name

    def bucket(name: str, members: list[ChunkPlacement]) -> Bucket:
        return bucket_for(name, [piece], tuple(members), param, held_by(param, members[0]))

    if len(by_set) == 1:
        return [bucket(named, placements)], why
    sizes = {len(devices) for devices in by_set}
    total = sum(len(devices) for devices in by_set)
    everyone = tuple(sorted({d for devices in by_set for d in devices}))
    if len(sizes) == 1 and total == len(everyone):  # same size and disjoint: shards line up, one by one
        copies = [bucket(f"{named}@{members[0].chunk}", members) for members in by_set.values()]
        zero, replicas = min(b.zero for b in copies), held_by(param, placements[0]).replicas
        names = [b.name for b in copies]
        return [
            replace(
                b,
                zero=zero,
                reduced_as=min(b.reduced_as for b in copies),  # float32 if any asks for it: they are one sum
                copies=len(copies) * (1 if zero else b.group_size) * replicas,
                siblings=tuple(name for name in names if name != b.name),
            )
            for b in copies
        ], why
    if held.distinct:
        raise ScheduleError(
            f"the tied parameter {param.name} is sharded on sets of devices that differ in size or overlap",
            by=placements[0].by,
            facts={placement.chunk: f"on {show(placement.devices)}" for placement in placements},
            hint="place the regions that share it on sets of the same size that are apart, or on one set",
        )
    if any(placement.policy.zero for placement in placements):
        sets = ", ".join(show(members[0].devices) for members in by_set.values())
        reason = "because its chunks live on sets that differ in size or overlap"
        why = [f"{param.name}: not sharded, {reason} ({sets})"]
    union = [replace(unsharded(placement), devices=everyone) for placement in placements]
    return [bucket(named, union)], why


def unsharded(placement: ChunkPlacement) -> ChunkPlacement:
    """Return a placement without ZeRO."""
    return replace(placement, policy=replace(placement.policy, zero=0, within=None, optimizer_within=None))


def check_sharded_alike(param: Parameter, placements: list[ChunkPlacement], *, several: bool) -> None:
    """Refuse a tied parameter that its chunks shard in different ways. several: on several sets."""
    held = {placement.chunk: held_by(param, unsharded(placement)) for placement in placements}
    by_expert = any(placement.policy.placements(param.name) for placement in placements)
    if len(set(held.values())) == 1 and not (several and by_expert):
        return
    first = next(placement for placement in placements if held[placement.chunk].distinct)
    what = "experts" if by_expert else "parameter"
    raise ScheduleError(
        f"the tied {what} {param.name} {'are' if by_expert else 'is'} not sharded alike",
        by=first.by,
        facts={
            placement.chunk: f"on {show(placement.devices)}, ways {held[placement.chunk].slices}"
            for placement in placements
        },
        hint="shard the regions that share experts alike, on the same devices"
        if by_expert
        else "shard all regions that share it along the same axes",
    )


def with_whole_parameters(buckets: ProgramBuckets) -> ProgramBuckets:
    """Cut sharded buckets between parameters, so that each parameter has one owner that updates all of it.

    PP=0/0: a, b, c in 2 equal shards, of which the border lies inside b
    -->
    PP=0/0: a, c | b     each owner has about as many elements as the others, over all buckets

    The owner is one of the devices of a group of ZeRO, and of those that have slices of the parameter.
    """
    loads: dict[tuple[tuple[Devices, ...], ...], list[int]] = {}
    owners: dict[str, int] = {}  # by parameter: the copies of a tied one have their owners in the same place
    cut: dict[str, Bucket] = {}
    for bucket in buckets.read.values():
        axes = tuple(sharding.axis for sharding in bucket.pieces[0].shardings)
        bucket = replace(bucket, slices=groups_along(bucket.devices, axes) if axes else ())
        ranks = (bucket.group_size if bucket.zero else 1) * bucket.slice_count
        if ranks == 1 or not bucket.trainable:
            cut[bucket.name] = replace(bucket, slices=())
            continue
        load = loads.setdefault((bucket.groups, bucket.slices), [0] * ranks)
        for piece in sorted(bucket.pieces, key=lambda piece: -piece.numel):
            owner = owners.setdefault(piece.name, load.index(min(load)))
            load[owner] += piece.numel
        pieces: list[Piece] = []
        bounds = [0]
        for rank in range(ranks):
            for piece in bucket.pieces:
                if owners[piece.name] == rank:
                    pieces.append(replace(piece, offset=sum(p.numel for p in pieces)))
            bounds.append(sum(p.numel for p in pieces))
        cut[bucket.name] = replace(bucket, pieces=tuple(pieces), bounds=tuple(bounds))
    return replace(buckets, read=cut, held=cut)
