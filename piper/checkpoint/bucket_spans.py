"""Maps a device's flat buckets to full, flattened parameters."""

from collections.abc import Iterable, Iterator
from itertools import chain

from piper.ir.sharding import FlatRuns, flat_runs
from piper.plan.bucket import Bucket
from piper.plan.plan import Plan, Plans
from piper.plan.updates import BucketUpdate


def spans(bucket: Bucket | BucketUpdate, device: int, low: int, high: int) -> dict[str, list[FlatRuns]]:
    """Return the runs of each parameter between two elements of a bucket, in their order there.

    Each lies `here` in the bucket as the device holds it when whole, and `there` in the full parameter,
    flattened. Padding has no runs.
    """
    position = bucket.devices.index(device)
    by_name: dict[str, list[FlatRuns]] = {}
    for piece, _, _ in bucket.pieces_in(low, high):
        mine = [
            cut
            for runs in flat_runs(piece.shape, piece.shardings, position)
            for cut in within(piece.offset + runs.here, runs, low, high)
        ]
        if mine:
            by_name.setdefault(piece.name, []).extend(sorted(mine, key=lambda runs: runs.here))
    return by_name


def within(at: int, runs: FlatRuns, low: int, high: int) -> Iterator[FlatRuns]:
    """Yield the parts of some runs that lie between two elements of a bucket. at: where the first run begins.

    Runs that lie there whole stay together. The range can cut one run at each of its ends.
    """
    step, length = runs.here_step or runs.length, runs.length
    if not length:
        return
    first = max(0, -(-(low - at) // step))
    last = min(runs.count, (high - length - at) // step + 1)
    if first < last:
        alone = last - first == 1
        yield FlatRuns(
            here=at + first * step,
            there=runs.there + first * runs.there_step,
            length=length,
            count=last - first,
            here_step=0 if alone else step,
            there_step=0 if alone else runs.there_step,
        )
    for run in (first - 1, max(first, last)):
        begin = at + run * step
        cut = max(begin, low), min(begin + length, high)
        if 0 <= run < runs.count and cut[0] < cut[1]:
            there = runs.there + run * runs.there_step + cut[0] - begin
            yield FlatRuns(here=cut[0], there=there, length=cut[1] - cut[0])


def length_of(several: Iterable[FlatRuns]) -> int:
    """Return how many elements some runs have."""
    return sum(runs.length * runs.count for runs in several)


def held_names(plans: Plans) -> set[str]:
    """Return the parameters and buffers that any device holds."""
    parameters = {piece.name for bucket in plans.buckets.values() for piece in bucket.pieces}
    return parameters.union(*(plan.buffers for plan in plans))


def saved_buckets(plans: Plans, device: int) -> list[BucketUpdate]:
    """Return the buckets that a device saves, as it updates them: each element is saved by one device.

    Of replicas that own the same elements it is the first, of a tied parameter's copies the first bucket.
    """
    saved = []
    _, device = plans.place_in_group(device)  # every group saves its own values
    for bucket in plans.buckets_on(device):
        update = bucket.update
        first = device in chain(*update.distinct)
        if first and not written_elsewhere(plans.buckets.values(), bucket):
            saved.append(update)
    return saved


def written_elsewhere(buckets: Iterable[Bucket], bucket: Bucket) -> bool:
    """Return whether an earlier bucket holds the same tied parameter."""
    names = {piece.name for piece in bucket.pieces}
    for earlier in buckets:
        if earlier is bucket:
            return False
        if not names.isdisjoint(piece.name for piece in earlier.pieces):
            return True
    raise AssertionError(f"{bucket.name} is not a bucket of these plans")


def saved_buffers(plans: Plans, device: int) -> list[str]:
    """Return the buffers that a device saves. Of devices that hold the same slice, the first one saves it."""

    def slices(plan: Plan, other: int) -> list[tuple[str, int]]:
        return [(name, slot.sharding.index(slot.position(other))) for name, slot in plan.buffers.items()]

    group, _ = plans.place_in_group(device)
    devices = [(plan, other) for plan in plans for other in plan.devices if other < device]
    same_group = ((plan, other) for plan, other in devices if plans.place_in_group(other)[0] == group)
    earlier = {held for plan, other in same_group for held in slices(plan, other)}
    return [held[0] for held in slices(plans.of(device), device) if held not in earlier]
