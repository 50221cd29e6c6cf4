"""Checks what plans say outside their instructions against the specification: programs, samples, buckets."""

from collections.abc import Iterator, Mapping

from piper.devices import Devices, Sharding, columns, groups_of, show
from piper.ir.chunk import Parameter
from piper.plan.plan import Bucket, Plans
from piper.proof.specification import Specification


def table_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield what is wrong with the tables of plans; the instructions mean nothing before these hold."""
    yield from header_problems(plans, spec)
    yield from pair_problems(plans)
    yield from buffer_problems(plans, spec)
    holders: dict[str, list[Bucket]] = {}  # by parameter
    for bucket in plans.buckets.values():
        for piece in bucket.pieces:
            holders.setdefault(piece.name, []).append(bucket)
    parameters = {param.name: param for param in spec.outline.parameters}
    for bucket in plans.buckets.values():
        family = {b.name: b for piece in bucket.pieces for b in holders[piece.name]}
        yield from bucket_problems(spec, bucket, list(family.values()))
        yield from piece_problems(spec, bucket, parameters)
    for name, chunk in spec.chunks.items():
        for param in chunk.params:
            count = sum(name in bucket.chunks for bucket in holders.get(param, ()))
            if count != 1:
                yield f"{name} finds {param} in {count} of its buckets"


def header_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield what is wrong with the devices of plans and with how they cut the samples."""
    devices = sorted(device for plan in plans for device in plan.devices)
    if devices != list(spec.devices):
        yield f"the plans are for devices {show(tuple(devices))}; they should be for {show(spec.devices)}"
    for name, found, wanted in (
        ("seed", plans.seed, spec.seed),
        ("weighted", plans.weighted, spec.outline.weight is not None),
        ("cells", plans.cells, spec.cells),
        ("axes", dict(plans.axes), spec.axes),
    ):
        if found != wanted:
            yield f"the plans say {name}={found}; it should be {wanted}"


def pair_problems(plans: Plans) -> Iterator[str]:
    """Yield the communicators of pairs in which a device sends or receives twice."""
    for comm in plans.comms.values():
        if comm.kind == "pairs":
            ends = [[pair[0] for pair in comm.groups], [pair[-1] for pair in comm.groups]]
            if any(len(pair) != 2 for pair in comm.groups) or any(len(set(e)) < len(e) for e in ends):
                yield f"{comm.name} does not join each sender to one receiver"


def bucket_problems(spec: Specification, bucket: Bucket, family: list[Bucket]) -> Iterator[str]:
    """Yield what is wrong with a bucket: where it lies, who reduces with whom, how many hold its gradient.

    `family`: the buckets that hold a parameter of this one, itself included.
    """
    homes = [spec.placement[name] for name in bucket.chunks if name in spec.chunks]
    if len(homes) < len(bucket.chunks) or not set(bucket.devices).issuperset(
        d for home in homes for d in home
    ):
        yield f"{bucket.name} does not lie on all devices of its chunks"
        return
    degrees = {spec.degree(name) if spec.routed(name) else 1 for name in bucket.chunks}
    if bucket.ways not in {1, *(degrees if len(degrees) == 1 else ())}:
        yield f"{bucket.name} is divided over {bucket.ways} devices; its experts are not"
        return
    groups = columns(groups_of(bucket.devices, bucket.ways)) if bucket.ways > 1 else (bucket.devices,)
    if bucket.groups != groups:
        found, wanted = (" and ".join(map(show, some[:4])) for some in (bucket.groups, groups))
        yield f"{bucket.name} reduces within {found}; it should be {wanted}"
    siblings = tuple(b.name for b in family if b.name != bucket.name)
    if set(bucket.siblings) != set(siblings):
        yield f"{bucket.name} has siblings {bucket.siblings}; it should have {siblings}"
    copies = len(family) * (1 if bucket.zero else bucket.group_size)
    if bucket.copies != copies or any(
        (b.zero, b.group_size) != (bucket.zero, bucket.group_size) for b in family
    ):
        yield f"{bucket.name} says that {bucket.copies} devices hold its gradient; it should be {copies}"
    if bucket.zero not in range(4) or (bucket.zero and bucket.group_size == 1):
        yield f"{bucket.name} is sharded, zero={bucket.zero}, over groups of {bucket.group_size}"


def divided(sharding: Sharding, devices: Devices = ()) -> str:
    """Write how a parameter or a buffer is divided, and over which devices where that is known."""
    over = f" over {show(devices)}" if devices else ""
    return (
        f"in {sharding.ways} parts along dimension {sharding.axis}" if sharding.ways > 1 else "whole"
    ) + over


def buffer_problems(plans: Plans, spec: Specification) -> Iterator[str]:
    """Yield the buffers that devices hold otherwise than the chunks that use them expect."""
    users: dict[str, list[str]] = {}
    for chunk in spec.outline.chunks:
        for name in chunk.buffers:
            users.setdefault(name, []).append(chunk.name)
    for plan in plans:
        for slot, held in plan.residents.items():
            if slot.kind != "buffer":
                continue
            for user in users.get(slot.owner, ()):
                if plan.devices[0] not in spec.placement[user]:
                    continue
                wanted = spec.sharding(user, slot.owner)
                placed = spec.placement[user] if wanted.ways > 1 else ()
                if (held.sharding, held.placed) != (wanted, placed):
                    found, should = divided(held.sharding, held.placed), divided(wanted, placed)
                    yield f"{user} finds {slot} {found}; it should be {should}"


def piece_problems(spec: Specification, bucket: Bucket, parameters: Mapping[str, Parameter]) -> Iterator[str]:
    """Yield what is wrong with the parameters of a bucket."""
    ends = [0, *(piece.offset + piece.numel for piece in bucket.pieces)]
    if any(piece.offset != end for piece, end in zip(bucket.pieces, ends, strict=False)):
        yield f"the parameters of {bucket.name} do not lie one after another"
    for piece in bucket.pieces:
        param = parameters.get(piece.name)
        if param is None:
            yield f"{bucket.name} holds {piece.name}, which the model does not have"
            continue
        wanted_shardings = {
            spec.sharding(chunk, piece.name) for chunk in bucket.chunks if chunk in spec.chunks
        }
        if wanted_shardings - {piece.sharding}:
            should = " and ".join(sorted(map(divided, wanted_shardings)))
            yield f"{bucket.name} holds {piece.name} {divided(piece.sharding)}; it should be {should}"
            continue
        shape = piece.sharding.local(param.shape)
        if piece.shape != shape or bucket.dtype != param.dtype:
            found, wanted = f"{piece.shape} of {bucket.dtype}", f"{shape} of {param.dtype}"
            yield f"{bucket.name} holds {piece.name} as {found}; it should be {wanted}"
        if bucket.trainable != spec.is_trained(piece.name):
            yield f"{bucket.name} says trainable={bucket.trainable} of {piece.name}; the model says otherwise"
