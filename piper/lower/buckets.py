"""Buckets: which parameters live, travel and are updated together, and among which devices."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from piper.devices import Devices, columns, groups_of, show
from piper.errors import ScheduleError
from piper.ids import SlotId
from piper.ir.chunk import Chunk, Outline, Parameter
from piper.ir.graph import Graph, Policy
from piper.lower.work import Settings, Work
from piper.plan.plan import Bucket, Piece, Slot

MEGABYTE = 2**20
BITS = re.compile(r"\d+")  # the first number in a type's name: float32, bfloat16, float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a chunk's parameters live, and how."""

    chunk: str
    devices: Devices
    policy: Policy
    origin: tuple[int, ...]
    by: str  # the directive that put it there


def make_buckets(work: Work) -> Work:
    """Group each chunk's parameters into buckets; a tied parameter gets buckets of its own.

    PP=0: a, b, tied     PP=1: c, tied
    -->
    PP=0/0: a, b     PP=1/0: c     tied@PP=0: tied     tied@PP=1: tied
    """
    graph = work.graph
    homes = homes_of(graph)
    parameters = {p.name: p for p in trained(graph.outline)}
    users: dict[str, list[str]] = {}
    for chunk in graph.outline.chunks:
        for name in chunk.params:
            users.setdefault(name, []).append(chunk.name)
    made: dict[str, Bucket] = {}
    why: list[str] = []
    for chunk in graph.outline.chunks:
        own = [parameters[name] for name in chunk.params if len(users[name]) == 1]
        for bucket in chunk_buckets(chunk, own, homes[chunk.name]):
            made[bucket.name] = bucket
    for name, chunks in users.items():
        if len(chunks) > 1:
            buckets, reason = tied_buckets(parameters[name], [homes[c] for c in chunks], made)
            made.update({bucket.name: bucket for bucket in buckets})
            why += reason
    by_chunk: dict[str, list[str]] = {chunk.name: [] for chunk in graph.outline.chunks}
    for bucket in made.values():
        for reader in bucket.chunks:
            by_chunk[reader].append(bucket.name)
    return replace(
        work,
        buckets=made,
        chunk_buckets={name: tuple(names) for name, names in by_chunk.items()},
        residents={**work.residents, **residents_of(made.values(), work.settings)},
        why=(*work.why, *why),
    )


def every_parameter_has_a_bucket(work: Work) -> Iterator[str]:
    """Each chunk finds each of its parameters in exactly one of its buckets."""
    for chunk in work.graph.outline.chunks:
        held = [p.name for b in work.chunk_buckets[chunk.name] for p in work.buckets[b].pieces]
        for name in chunk.params:
            if held.count(name) != 1:
                yield f"{chunk.name} finds {name} in {held.count(name)} of its buckets"


def homes_of(graph: Graph) -> dict[str, Home]:
    """Where each chunk lives."""
    homes: dict[str, Home] = {}
    for node in graph.nodes.values():
        if node.chunk not in homes:
            homes[node.chunk] = Home(
                chunk=node.chunk,
                devices=node.devices,
                policy=graph.policy(node.chunk),
                origin=node.origin,
                by=graph.placed_by(node),
            )
    return homes


def trained(outline: Outline) -> Iterator[Parameter]:
    """The parameters, those that no backward reaches as frozen: an optimizer leaves both alone."""
    reached = {
        name for chunk in outline.chunks if "B" in chunk.phases for name in chunk.phases["B"].grad_params
    }
    for param in outline.parameters:
        yield replace(param, trainable=param.trainable and param.name in reached)


def chunk_buckets(chunk: Chunk, params: Iterable[Parameter], home: Home) -> Iterator[Bucket]:
    """A chunk's own parameters in buckets of at most `bucket_mb`, alike in type and in who holds what."""
    kinds: dict[tuple[str, bool, int], list[Parameter]] = {}
    for param in params:
        key = (param.dtype, param.trainable, home.policy.sharding(param.name).ways)
        kinds.setdefault(key, []).append(param)
    limit = home.policy.bucket_mb
    number = 0
    for (dtype, trainable, _), members in kinds.items():
        pieces: list[Piece] = []
        filled = 0
        for param in members:
            piece = piece_of(param, home, filled)
            if pieces and limit is not None and (filled + piece.numel) * itemsize(dtype) > limit * MEGABYTE:
                yield bucket_for(f"{chunk.name}/{number}", pieces, (home,), dtype, trainable)
                number, pieces, filled = number + 1, [], 0
                piece = replace(piece, offset=0)
            pieces.append(piece)
            filled += piece.numel
        yield bucket_for(f"{chunk.name}/{number}", pieces, (home,), dtype, trainable)
        number += 1


def piece_of(param: Parameter, home: Home, offset: int) -> Piece:
    """What one device holds of a parameter."""
    sharding = home.policy.sharding(param.name)
    return Piece(name=param.name, shape=sharding.local(param.shape), offset=offset, sharding=sharding)


def itemsize(dtype: str) -> int:
    """The bytes of one element."""
    bits = BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1  # bool


def bucket_for(
    name: str, pieces: list[Piece], homes: tuple[Home, ...], dtype: str, trainable: bool
) -> Bucket:
    """A bucket that lives on the homes' devices: the same set for each of them."""
    home, ways = homes[0], pieces[0].sharding.ways
    groups = columns(groups_of(home.devices, ways)) if ways > 1 else (home.devices,)
    zero = min(h.policy.zero for h in homes) if len(groups[0]) > 1 else 0
    return Bucket(
        name=name,
        pieces=tuple(pieces),
        devices=home.devices,
        groups=groups,
        chunks=tuple(h.chunk for h in homes),
        dtype=dtype,
        itemsize=itemsize(dtype),
        zero=zero,
        trainable=trainable,
        copies=1 if zero else len(groups[0]),
        reduce_stream=home.policy.reduce_stream,
        gather_stream=home.policy.gather_stream,
        origin=tuple(dict.fromkeys(n for h in homes for n in h.origin)),
    )


def tied_buckets(
    param: Parameter, homes: list[Home], taken: Collection[str]
) -> tuple[list[Bucket], list[str]]:
    """Buckets for a parameter that several chunks use: one per set of devices, or one over them all."""
    named = param.name
    while not {named, *(f"{named}@{home.chunk}" for home in homes)}.isdisjoint(taken):
        named += "'"  # a parameter may be called as a chunk's bucket is
    by_set: dict[Devices, list[Home]] = {}
    for home in homes:
        by_set.setdefault(home.devices, []).append(home)
    divided = {home.chunk: home.policy.sharding(param.name) for home in homes}
    if len(set(divided.values())) > 1 or (len(by_set) > 1 and divided[homes[0].chunk].ways > 1):
        raise ScheduleError(
            f"the tied experts {param.name} are not divided alike",
            by=next(home.by for home in homes if divided[home.chunk].ways > 1),
            facts={home.chunk: f"on {show(home.devices)}, ways {divided[home.chunk].ways}" for home in homes},
            hint="shard the regions that share experts alike, on the same devices",
        )
    piece = piece_of(param, homes[0], 0)

    def bucket(name: str, members: Iterable[Home]) -> Bucket:
        return bucket_for(name, [piece], tuple(members), param.dtype, param.trainable)

    if len(by_set) == 1:
        return [bucket(named, homes)], []
    sizes = {len(devices) for devices in by_set}
    total = sum(len(devices) for devices in by_set)
    everyone = tuple(sorted({d for devices in by_set for d in devices}))
    if len(sizes) == 1 and total == len(everyone):  # same size and disjoint: shards line up, one by one
        zero = min(home.policy.zero for home in homes) if sizes != {1} else 0
        made = [bucket(f"{named}@{members[0].chunk}", members) for members in by_set.values()]
        names = [b.name for b in made]
        return [
            replace(
                b,
                zero=zero,
                copies=len(made) * (1 if zero else b.group_size),
                siblings=tuple(n for n in names if n != b.name),
            )
            for b in made
        ], []
    union = [replace(home, devices=everyone, policy=replace(home.policy, zero=0)) for home in homes]
    reason = (
        f"{param.name}: not sharded, because its chunks live on sets that differ in size or overlap "
        f"({', '.join(show(devices) for devices in by_set)})"
    )
    return [bucket(named, union)], [reason] if any(h.policy.zero for h in homes) else []


def residents_of(buckets: Iterable[Bucket], settings: Settings) -> dict[SlotId, Slot]:
    """The slots that outlive a step: parameters, master copies and optimizer state."""
    residents: dict[SlotId, Slot] = {}
    for bucket in buckets:
        whole = bucket.zero < 3
        residents[param_slot(bucket)] = Slot(nbytes=bucket.nbytes if whole else bucket.shard_nbytes)
        if bucket.trainable:
            owned = bucket.padded // bucket.group_size if bucket.zero else bucket.numel
            residents[SlotId("state", bucket.name)] = Slot(
                nbytes=owned * (settings.state_bytes + settings.master_bytes)
            )
    return residents


def param_slot(bucket: Bucket) -> SlotId:
    """The slot of a bucket's parameters between uses."""
    return SlotId("param", bucket.name)
