"""Which device updates which parameter, for an optimizer that needs parameters whole."""

from dataclasses import replace

from piper.ir.devices import Devices
from piper.ir.mesh import groups_along
from piper.lower.buckets import ProgramBuckets
from piper.plan.bucket import Bucket
from piper.plan.updates import Piece


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
