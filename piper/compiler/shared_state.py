"""Fits other programs of a job, for evaluation or for batches of other sizes, to the state of the first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from piper.checkpoint.moves import moves_between
from piper.errors import CaptureError, ScheduleError
from piper.ir.chunk import Parameter
from piper.ir.devices import show
from piper.ir.graph import Graph
from piper.ir.grouping import grouped
from piper.job import Batch, Job, limit_of
from piper.lower.buckets import ProgramBuckets
from piper.lower.placements import placements_of
from piper.lower.state import LoweringState
from piper.plan.bucket import Bucket
from piper.plan.plan import Plan, Slot
from piper.plan.updates import Piece
from piper.runtime.batch import COUNTS
from piper.runtime.setup import ProgramLike


def reads_state_of(trained: Graph, buckets: Mapping[str, Bucket], graph: Graph) -> Graph:
    """Return a forward that reads parameters and buffers where the program that trains them has them."""
    before, placed = (devices_of_chunks(each) for each in (trained, graph))
    buffers: dict[str, set[int]] = {}
    for chunk in trained.outline.chunks:
        for name in chunk.buffers:
            buffers.setdefault(name, set()).update(before[chunk.name])
    for chunk in graph.outline.chunks:
        for name in chunk.buffers:
            if name in buffers and not buffers[name].issuperset(placed[chunk.name]):
                raise CaptureError(
                    f"the buffer {name} is on other devices in eval mode",
                    by="model",
                    facts={
                        "training": f"uses it on {show(tuple(sorted(buffers[name])))}",
                        chunk.name: f"uses it on {show(tuple(sorted(placed[chunk.name])))}",
                    },
                    hint="place the regions that share the buffer on the same devices",
                )
    used = {name for chunk in graph.outline.chunks for name in chunk.params}
    if unknown := used - {piece.name for bucket in buckets.values() for piece in bucket.pieces}:
        raise CaptureError(
            f"the model uses {min(unknown)} in eval mode only",
            by="model",
            facts={"but": "evaluation reads the parameters of the training program"},
            hint="make it a buffer, or let the forward use it in both modes",
        )
    parameters = {parameter.name: parameter for parameter in graph.outline.parameters}
    for parameter in trained.outline.parameters:
        if parameter.name in used:  # others lie nowhere in the program of the forward
            assert layout_of(parameter) == layout_of(parameters[parameter.name]), parameter.name
    frozen = tuple(replace(parameter, trainable=False) for parameter in trained.outline.parameters)
    return replace(graph, outline=replace(graph.outline, parameters=frozen))


def share_buckets(
    graph: Graph, held: Mapping[str, Bucket], own: ProgramBuckets | None = None
) -> ProgramBuckets:
    """Read parameters from the buckets of another program of the same job, which trains them.

    PP=0/0 (read by PP=0)
    -->
    PP=0/0 (read by the chunks of this program that use its parameters)

    own: the buckets that this program would have alone, if it trains the parameters too. They lie as the
    others do, so only what a program does with a bucket is its own: its streams, and how long it is kept.
    """
    placements = placements_of(graph)
    readers: dict[str, list[str]] = {}
    for chunk in graph.outline.chunks:
        for name in chunk.params:
            having = (b for b in held.values() if any(piece.name == name for piece in b.pieces))
            bucket = next(b for b in having if set(placements[chunk.name].devices) <= set(b.devices))
            if chunk.name not in readers.setdefault(bucket.name, []):
                readers[bucket.name].append(chunk.name)
    read: dict[str, Bucket] = {}
    for bucket in held.values():
        if bucket.name in readers:
            siblings = tuple(name for name in bucket.siblings if name in readers)
            shared = replace(
                bucket,
                chunks=tuple(readers[bucket.name]),
                trainable=bucket.trainable and own is not None,
                siblings=siblings,
                copies=bucket.copies * (1 + len(siblings)) // (1 + len(bucket.siblings)),
            )
            read[bucket.name] = shared if own is None else used_as(shared, own)
    return ProgramBuckets(read=read, held=held if own is None else read, why=own.why if own else ())


def used_as(bucket: Bucket, own: ProgramBuckets) -> Bucket:
    """Return a bucket with the streams, and the directives, of the program that has buckets of its own."""
    names = {piece.name for piece in bucket.pieces}
    mine = [b for b in own.read.values() if any(piece.name in names for piece in b.pieces)]
    return replace(
        bucket,
        keep=all(each.keep for each in mine),
        reduce_stream=mine[0].reduce_stream,
        gather_stream=mine[0].gather_stream,
        origin=tuple(dict.fromkeys(number for each in mine for number in each.origin)),
    )


def held_otherwise(
    own: Mapping[str, Bucket], held: Mapping[str, Bucket]
) -> Iterator[tuple[str, Bucket | None, Bucket | None]]:
    """Yield each parameter that does not lie alike in two sets of buckets, with its bucket in each."""
    # Which other parameters are in its bucket does not matter. A tied one has several.
    mine, others = (
        grouped((piece.name, (bucket, piece)) for bucket in buckets.values() for piece in bucket.pieces)
        for buckets in (own, held)
    )
    for name in dict.fromkeys((*mine, *others)):
        ours, theirs = mine.get(name, []), others.get(name, [])
        if [held_as(*one) for one in ours] != [held_as(*one) for one in theirs]:
            first = [each[0][0] if each else None for each in (ours, theirs)]
            yield name, first[0], first[1]


def held_as(bucket: Bucket, piece: Piece) -> object:
    """Return how a parameter lies on devices: who holds, reduces and updates what of it, in which types."""
    sets = (bucket.devices, bucket.groups, bucket.inside, bucket.across)
    types = (bucket.dtype, bucket.reduced_as, bucket.gathered_as)
    counts = (bucket.zero, bucket.copies, bucket.clones)
    return sets, types, counts, bucket.trainable, piece.shape, piece.shardings


def devices_of_chunks(graph: Graph) -> dict[str, set[int]]:
    """Return the devices that run some microbatch of each chunk."""
    devices: dict[str, set[int]] = {}
    for node in graph.nodes.values():
        devices.setdefault(node.chunk, set()).update(node.devices)
    return devices


def layout_of(parameter: Parameter) -> object:
    """Return the shape and type of a parameter, and how it lies on its devices."""
    placements = [(along.axis, along.degree, along.placement) for along in parameter.placements]
    return parameter.shape, parameter.dtype, placements


def holder_of(
    first: Job, programs: Sequence[LoweringState], job: Job, graph: Graph, own: ProgramBuckets, batch: Batch
) -> LoweringState | None:
    """Return the program whose buckets another one trains too. None: there is none, and the state moves.

    programs: that of the job `first`, then those for batches of other sizes.
    """
    earlier = programs[0]
    here, there = earlier.graph.outline.reached, graph.outline.reached
    if apart := sorted(here ^ there):
        raise another_model(batch, "parameters", f"{apart[0]} is trained only for one of them")
    same_strategy = limit_of(first) == limit_of(job)
    if not same_strategy and (graph.averaging or earlier.graph.averaging):
        raise other_layout(first, job, "groups that train apart", ("one strategy", "another one"))
    for known in programs:
        if next(held_otherwise(own.read, known.buckets), None) is None:
            return known
    for name, its, ours in held_otherwise(own.read, earlier.buckets):
        if same_strategy or ours is None or its is None:
            which = "lies otherwise" if ours and its else "is used only"
            raise another_model(batch, "parameters", f"{name} {which} for one of them")
        kinds = {(bucket.dtype, bucket.trainable, bucket.clones) for bucket in (ours, its)}
        if len(kinds) > 1 or ours.clones:  # it cannot move
            raise other_layout(first, job, name, (described(ours), described(its)))
    return None


def check_same_state(program: ProgramLike, other: ProgramLike, batch: Batch) -> None:
    """Refuse a program that needs other buffers than the first one, or keeps state elsewhere, on a device."""
    moves = not other.plans.lie_in(program.plans)
    if moves and program.plans.devices != other.plans.devices:
        sets = (show(program.plans.devices), show(other.plans.devices))
        raise other_layout(program.job, other.job, "parameters on other devices", sets)
    if moves:
        for known in (program, *program.shapes.values()):  # proven both ways
            moves_between(known.plans.buckets, other.plans.buckets)
            moves_between(other.plans.buckets, known.plans.buckets)
    for device in other.plans.devices:
        ours, its = program.plans.of(device), other.plans.of(device)
        check_same_buffers(program, other, device, batch)
        for slot in its.residents.keys() & ours.residents.keys():
            held, needed = (where_it_lies(plan.residents[slot]) for plan in (ours, its))
            if slot.kind in (("buffer",) if moves else ("param", "state", "buffer")) and held != needed:
                raise other_layout(program.job, other.job, f"{slot.owner} on device {device}", (held, needed))
        away = [sum(one.host for one in plan.residents.values()) for plan in (ours, its)]
        if moves and any(away):
            what = f"the state of device {device} in memory of the host, which cannot move,"
            raise other_layout(program.job, other.job, what, (f"{away[0]} bytes", f"{away[1]} bytes"))
        if copied(ours) != copied(its) or (moves and copied(ours)):
            what = f"the copies of the state of device {device}"
            raise other_layout(program.job, other.job, what, (str(copied(ours)), str(copied(its))))


def check_same_buffers(program: ProgramLike, other: ProgramLike, device: int, batch: Batch) -> None:
    """Refuse a buffer that steps write and that a device has in one of two programs only."""
    before, written = (
        {name for chunk in one.outline.chunks for name in chunk.mutated} for one in (program, other)
    )
    ours, its = program.plans.of(device).buffers.keys(), other.plans.of(device).buffers.keys()
    apart = sorted((its - ours) & (before | written) | (ours - its) & written)
    if apart and limit_of(program.job) == limit_of(other.job):
        raise another_model(batch, "buffers", f"{apart[0]} is written only for one of them")
    if apart:
        what = f"{apart[0]}, a buffer that steps write, on device {device}"
        held = ("it is there", "it is not") if apart[0] in ours else ("it is not", "it is there")
        raise other_layout(program.job, other.job, what, held)


def where_it_lies(slot: Slot) -> str:
    """Return in words where a device has what outlives a step."""
    cut = f", sharded along dimension {slot.sharding.dim} over {show(slot.placed)}" if slot.shardings else ""
    return f"{slot.nbytes} bytes on the device, {slot.host} on the host{cut}"


def copied(plan: Plan) -> list[tuple[str, ...]]:
    """Return what the instructions of a plan copy so that it outlives a worker, in order."""
    return [tuple(map(str, ins.reads)) for ins in plan.instrs if ins.op in ("protect", "mirror")]


def described(bucket: Bucket) -> str:
    """Return in words how the devices of a bucket hold its parameters."""
    shardings = {sharding.degree for piece in bucket.pieces for sharding in piece.shardings}
    cut = f", in {max(shardings)} shards" if shardings else ""
    return f"on {show(bucket.devices)}{cut}, ZeRO-{bucket.zero} in groups of {bucket.group_size}"


def other_layout(first: Job, job: Job, what: str, held: tuple[str, str]) -> ScheduleError:
    """Return the error of two strategies of a job that do not hold some state alike."""
    return ScheduleError(
        f"the strategies for two lengths hold {what} differently",
        by="strategy",
        facts={f"up to {limit_of(each)}": how for each, how in zip((first, job), held, strict=True)},
        hint="let all strategies of a job have the same devices, types of parameters, buffers and copies of "
        "the state; they may shard parameters and slice batches differently",
    )


def another_model(batch: Batch, what: str, which: str) -> CaptureError:
    """Return the error of a model that is not the same for batches of other sizes."""
    sizes = ", ".join(f"{name} {tuple(field.shape)}" for name, field in batch.items() if name != COUNTS)
    return CaptureError(
        f"the model has other {what} for batches of other sizes",
        by="model",
        facts={"batch": sizes, "why": which},
        hint="let the forward use the same layers whatever the sizes, or pad batches: Job(buckets=...)",
    )
