"""Buckets of one program that other programs of the same job read, or train too."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from piper.ir.graph import Graph
from piper.ir.grouping import grouped
from piper.lower.buckets import ProgramBuckets
from piper.lower.placements import placements_of
from piper.plan.bucket import Bucket
from piper.plan.updates import Piece


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
        if [layout_of(*one) for one in ours] != [layout_of(*one) for one in theirs]:
            first = [each[0][0] if each else None for each in (ours, theirs)]
            yield name, first[0], first[1]


def layout_of(bucket: Bucket, piece: Piece) -> object:
    """Return how a parameter lies on devices: who holds, reduces and updates what of it, in which types."""
    sets = (bucket.devices, bucket.groups, bucket.inside, bucket.across)
    types = (bucket.dtype, bucket.reduced_as, bucket.gathered_as)
    counts = (bucket.zero, bucket.copies, bucket.clones)
    return sets, types, counts, bucket.trainable, piece.shape, piece.shardings
