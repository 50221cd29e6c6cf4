"""Checks what plans say outside their instructions against the specification: programs, samples, buckets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from piper.ir.chunk import Batch, Parameter
from piper.ir.devices import show
from piper.ir.grouping import grouped
from piper.ir.mesh import copies_along, groups_along, groups_apart
from piper.ir.sharding import UNSHARDED, Sharding, local_sizes, shardings_on, show_shardings
from piper.plan.bucket import Bucket
from piper.plan.plan import Plans
from piper.proof.specification import Holding, Specification, in_any_order


def table_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield the problems of the tables of plans. Instructions mean nothing unless these hold."""
    yield from header_problems(plans, spec)
    yield from sharding_problems(spec)
    yield from pair_problems(plans)
    yield from buffer_problems(plans, spec)
    holders = grouped((piece.name, bucket) for bucket in plans.buckets.values() for piece in bucket.pieces)
    parameters = {param.name: param for param in spec.outline.parameters}
    for bucket in plans.buckets.values():
        family = list({b.name: b for piece in bucket.pieces for b in holders[piece.name]}.values())
        ways_held = holdings(spec, bucket, family, parameters)
        yield from bucket_problems(spec, bucket, family, ways_held)
        yield from piece_problems(spec, bucket, parameters, ways_held)
    for name, chunk in spec.chunks.items():
        for param in chunk.params:
            count = sum(name in bucket.chunks for bucket in holders.get(param, ()))
            if count != 1:
                yield f"{name} finds {param} in {count} of its buckets"


def shard_problems(plans: Plans, whole: bool) -> Iterator[str]:
    """Yield the shards that do not make up their bucket, or that cut a parameter apart.

    whole: the optimizer needs whole parameters, so that each must lie in the shard of one owner.
    """
    for bucket in plans.buckets.values():
        bounds = bucket.bounds
        axes = {tuple(sharding.axis for sharding in piece.shardings) for piece in bucket.pieces}
        sliced = any(axes) and whole and bucket.trainable
        if sliced and {bucket.slices} != {groups_along(bucket.devices, each) for each in axes}:
            yield f"{bucket.name} has slices of parameters that its optimizer needs in full"
        if not bounds and not (whole and (bucket.zero or sliced) and bucket.trainable):
            continue
        shards = (bucket.group_size if bucket.zero else 1) * bucket.slice_count
        if len(bounds) != shards + 1 or list(bounds) != sorted(bounds):
            yield f"{bucket.name} has no shard for each of its {shards} owners"
        elif (bounds[0], bounds[-1]) != (0, bucket.own_numel):
            all_of_it = f"{bucket.own_numel} elements"
            yield f"the shards of {bucket.name} hold {bounds[0]} to {bounds[-1]} of {all_of_it}"
        else:
            for piece in bucket.pieces:
                if any(piece.offset < bound < piece.offset + piece.numel for bound in bounds):
                    yield f"{bucket.name} cuts {piece.name} apart, which its optimizer needs whole"


def header_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield the problems with the devices of plans and with how they slice the samples."""
    devices = sorted(device for plan in plans for device in plan.devices)
    if devices != list(spec.devices):
        yield f"the plans are for devices {show(tuple(devices))}; they should be for {show(spec.devices)}"
    for name, said, wanted in (
        ("seed", plans.seed, spec.seed),
        ("weighted", plans.weighted, spec.outline.weight is not None),
        ("cells", plans.cells, spec.cells),
        ("copies", plans.copies, spec.copies),
        ("sums", dict(plans.sums), {each.name: each.length for each in spec.sums}),
        ("axes", dict(plans.axes), spec.axes),
    ):
        if said != wanted:
            yield f"the plans say {name}={said}; it should be {wanted}"
    for slot, source in spec.microbatch_sums.items():
        if (there := spec.meshes[source.chunk].degree) != spec.copies:
            yield f"{spec.copies} devices hold each loss and {there} each {slot}; they are counted alike"


def sharding_problems(spec: Specification) -> Iterator[str]:
    """Yield where the captured model is sharded differently from the directives."""
    degrees: dict[str, set[int]] = {}
    for name, chunk in spec.chunks.items():
        how, axes = chunk.collective, {a.name: a.degree for a in spec.meshes[name].sharing}
        for axis, degree in axes.items():
            degrees.setdefault(axis, set()).add(degree)
        if how is not None and axes.get(how.axis) != how.degree:
            there = axes.get(how.axis, 1)
            yield f"{name} is for {how.degree} devices along {how.axis}; its region has {there}"
        for source, given in zip(chunk.inputs, chunk.input_specs, strict=True):
            if isinstance(source, Batch):
                shape = local_sizes(spec.outline.batch[source.field].shape, spec.cuts(name, source.field))
                if given.shape[1:] != shape[1:]:
                    yield f"{name} reads {source.field} as {given.shape}; its region loads {shape}"
    for parameter in spec.outline.parameters:
        by_axis = {along.axis: along.degree for along in parameter.placements}
        inner = {copies_along(axis): axis for axis in by_axis}  # a part of the axis, whose slices are copied
        for axis in by_axis.keys() - inner.keys():
            degree = by_axis[axis] * by_axis.get(copies_along(axis), 1)
            if degree not in degrees.get(axis, ()):
                yield f"{parameter.name} is sharded over {degree} devices along {axis}; no region is"


def pair_problems(plans: Plans) -> Iterator[str]:
    """Yield the communicators of pairs in which a device sends or receives twice."""
    for comm in (comm for comm in plans.comms.values() if comm.kind == "pairs"):
        ends = [[pair[0] for pair in comm.groups], [pair[-1] for pair in comm.groups]]
        if any(len(pair) != 2 for pair in comm.groups) or any(len(set(e)) < len(e) for e in ends):
            yield f"{comm.name} does not join each sender to one receiver"


def holdings(
    spec: Specification, bucket: Bucket, family: Sequence[Bucket], parameters: Mapping[str, Parameter]
) -> dict[str, list[Holding]]:
    """Return how each chunk that uses a parameter of a bucket holds it: all alike, if all is well."""
    chunks = dict.fromkeys(name for b in family for name in b.chunks if name in spec.chunks)
    ways_held: dict[str, list[Holding]] = {}
    for name in (piece.name for piece in bucket.pieces if piece.name in parameters):
        users = (chunk for chunk in chunks if name in spec.chunks[chunk].params)
        ways_held[name] = list(dict.fromkeys(spec.holding(user, parameters[name]) for user in users))
    return ways_held


def bucket_problems(
    spec: Specification, bucket: Bucket, family: list[Bucket], ways_held: Mapping[str, list[Holding]]
) -> Iterator[str]:
    """Yield the problems of a bucket: its devices, its groups, and the holders of its gradient."""
    placements = [spec.placement[name] for name in bucket.chunks if name in spec.chunks]
    needed = {device for placement in placements for device in placement}
    if len(placements) < len(bucket.chunks) or not needed.issubset(bucket.devices):
        yield f"{bucket.name} does not lie on all devices of its chunks"
        return
    apart = any(placement != bucket.devices for placement in placements)
    groups = (group_problems(bucket, len(family), name, each, apart) for name, each in ways_held.items())
    yield from islice(chain.from_iterable(groups), 1)  # what is wrong with one parameter is so with all
    siblings = tuple(b.name for b in family if b.name != bucket.name)
    if set(bucket.siblings) != set(siblings):
        yield f"{bucket.name} has siblings {bucket.siblings}; it should have {siblings}"
    if any((b.zero, b.group_size) != (bucket.zero, bucket.group_size) for b in family):
        yield f"{bucket.name} is sharded, zero={bucket.zero}, otherwise than {', '.join(siblings)}"
    if any(spec.graph.policy(name).clones != bucket.clones for name in bucket.chunks):
        yield f"{bucket.name} has room for {bucket.clones} clones; its chunks ask for another number"
    if bucket.zero not in range(4) or (bucket.zero and bucket.group_size == 1 and not bucket.clones):
        yield f"{bucket.name} is sharded, zero={bucket.zero}, over groups of {bucket.group_size}"


def group_problems(
    bucket: Bucket, family: int, name: str, holdings: Sequence[Holding], apart: bool
) -> Iterator[str]:
    """Yield the problems with the groups of a bucket for one of its parameters."""
    if len(holdings) > 1:
        yield f"{bucket.name} holds {name}, which its chunks shard in {len(holdings)} ways"
    for holding in holdings[:1]:
        if holding.distinct and apart:
            yield f"{bucket.name} holds {name}, which is sharded, on other devices than its chunks"
        across = holding.across if bucket.zero else ()
        owners = holding.owners if bucket.zero else ()
        apart_along = (*holding.distinct, *across)
        groups = groups_apart(bucket.devices, apart_along, *owners)
        inside = groups_apart(bucket.devices, (*apart_along, *owners)) if owners and bucket.zero == 3 else ()
        if bucket.clones:  # experts are cloned among the devices that shard them
            inside = groups_along(bucket.devices, tuple(sharding.axis for sharding in holding.shardings))
        summed = groups_along(bucket.devices, across) if across else ()
        for how, reduces, wanted in (
            ("within", bucket.groups, groups),
            ("inside", bucket.inside, inside),
            ("across", bucket.across, summed),
        ):
            if reduces != wanted:
                here, should = (" and ".join(map(show, some[:4])) for some in (reduces, wanted))
                yield f"{bucket.name} reduces {how} {here or 'none'}; it should be {should or 'none'}"
        shards = bucket.group_size if bucket.zero else 1
        copies = family * len(bucket.devices) // (holding.slices * shards)
        if bucket.copies != copies:
            yield f"{bucket.name} says that {bucket.copies} devices hold its gradient; it should be {copies}"


def shown_shardings(shardings: Sequence[Sharding]) -> str:
    """Describe how a parameter or a buffer is sharded, as plans do."""
    return show_shardings([sharding for sharding in shardings if sharding.degree > 1]) or "whole"


def buffer_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield the buffers that devices hold differently from what the chunks that use them expect."""
    users = grouped((name, chunk.name) for chunk in spec.outline.chunks for name in chunk.buffers)
    for plan in plans:
        for slot, resident in plan.residents.items():
            for user in users.get(slot.owner, ()) if slot.kind == "buffer" else ():
                mesh, placement = spec.meshes[user], spec.placement[user]
                by_expert = shardings_on(mesh, spec.graph.policy(user).placements(slot.owner))
                wanted = by_expert[0] if by_expert else replace(UNSHARDED, stride=mesh.degree)
                placed = placement if by_expert else ()
                if plan.devices[0] not in placement or resident.sharding.degree == wanted.degree == 1:
                    continue
                if (resident.sharding, resident.placed) != (wanted, placed):
                    here, there = shown_shardings([resident.sharding]), show(resident.placed)
                    should = f"{shown_shardings([wanted])} on {show(placed) or 'all'}"
                    yield f"{user} finds {slot} {here} on {there or 'all'}; it should be {should}"


def piece_problems(
    spec: Specification,
    bucket: Bucket,
    parameters: Mapping[str, Parameter],
    ways_held: Mapping[str, list[Holding]],
) -> Iterator[str]:
    """Yield the problems with the parameters of a bucket."""
    ends = [0, *(piece.offset + piece.numel for piece in bucket.pieces)]
    if any(piece.offset != end for piece, end in zip(bucket.pieces, ends, strict=False)):
        yield f"the parameters of {bucket.name} do not lie one after another"
    for piece in bucket.pieces:
        param = parameters.get(piece.name)
        if param is None:
            yield f"{bucket.name} holds {piece.name}, which the model does not have"
            continue
        wanted_shardings = {each.shardings for each in ways_held[piece.name]}
        if wanted_shardings - {in_any_order(piece.shardings)}:
            should = " and ".join(sorted(map(shown_shardings, wanted_shardings)))
            here = shown_shardings(piece.shardings)
            yield f"{bucket.name} holds {piece.name} {here}; it should be {should}"
            continue
        shape = local_sizes(param.shape, piece.shardings)
        if piece.shape != shape or bucket.dtype != param.dtype:
            held_as = f"{piece.shape} of {bucket.dtype}"
            yield f"{bucket.name} holds {piece.name} as {held_as}; it should be {shape} of {param.dtype}"
        if bucket.trainable != (piece.name in spec.contributors):
            yield f"{bucket.name} says trainable={bucket.trainable} of {piece.name}; the model says otherwise"
