"""Maps a device's flat buckets to full, flattened parameters."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from piper.ir.sharding import FlatRuns, flat_runs
from piper.plan.bucket import Bucket
from piper.plan.plan import Plan, Plans
from piper.plan.updates import Piece


def spans(bucket: Bucket, device: int, low: int, high: int) -> dict[str, list[FlatRuns]]:
    """Return the runs of each parameter between two elements of a bucket, in their order there.

    Each lies `here` in the bucket as the device holds it when whole, and `there` in the full parameter,
    flattened. Padding has no runs.
    """
    position = bucket.devices.index(device)
    by_name: dict[str, list[FlatRuns]] = {}
    for piece, _, _ in bucket.pieces_in(low, high):
        if mine := piece_runs(piece, position, low, high):
            by_name.setdefault(piece.name, []).extend(mine)
    return by_name


def piece_runs(piece: Piece, position: int, low: int, high: int) -> list[FlatRuns]:
    """Return the runs of one piece between two elements of its bucket; `position`: of the device in it."""
    runs = [
        cut
        for runs in flat_runs(piece.shape, piece.shardings, position)
        for cut in within(piece.offset + runs.here, runs, low, high)
    ]
    return sorted(runs, key=lambda runs: runs.here)


def within(at: int, runs: FlatRuns, low: int, high: int) -> Iterator[FlatRuns]:
    """Yield the parts of runs between two elements of a bucket, whole ones together; `at`: of the first."""
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


def common_runs(one: FlatRuns, other: FlatRuns) -> Iterator[FlatRuns]:
    """Yield the elements, by `there`, that two have: `here` in the first one, and `there` in the second."""
    if one.count > 1 and other.count > 1 and one.there_step == other.there_step:
        yield from common_at_one_distance(one, other)
    elif one.count > other.count:
        yield from (turned(runs) for runs in common_runs(other, one))
    else:  # run by run: those of the other that lie in it
        for n in range(one.count):
            here, there = one.here + n * one.here_step, one.there + n * one.there_step
            for runs in within(other.there, turned(other), there, there + one.length):
                yield replace(runs, here=here + runs.here - there)


def common_at_one_distance(one: FlatRuns, other: FlatRuns) -> Iterator[FlatRuns]:
    """Yield the common elements of two sets of runs, where both lie at the same distance in the tensor."""
    step, ahead = one.there_step, one.there - other.there
    first, last = (ahead - other.length) // step + 1, -(-(ahead + one.length) // step) - 1
    for shift in range(first, last + 1):  # run n of the first meets run n + shift of the second
        begin = other.there + shift * step
        low, high = max(one.there, begin), min(one.there + one.length, begin + other.length)
        start, stop = max(0, -shift), min(one.count, other.count - shift)
        if start < stop:
            alone = stop - start == 1
            yield FlatRuns(
                here=one.here + start * one.here_step + low - one.there,
                there=other.here + (start + shift) * other.here_step + low - begin,
                length=high - low,
                count=stop - start,
                here_step=0 if alone else one.here_step,
                there_step=0 if alone else other.here_step,
            )


def turned(runs: FlatRuns) -> FlatRuns:
    """Return runs with `here` and `there` exchanged."""
    return replace(
        runs, here=runs.there, there=runs.here, here_step=runs.there_step, there_step=runs.here_step
    )


def length_of(several: Iterable[FlatRuns]) -> int:
    """Return how many elements some runs have."""
    return sum(runs.length * runs.count for runs in several)


def held_names(plans: Plans) -> set[str]:
    """Return the parameters and buffers that any device holds."""
    parameters = {piece.name for bucket in plans.buckets.values() for piece in bucket.pieces}
    return parameters.union(*(plan.buffers for plan in plans))


def saved_buckets(plans: Plans, device: int) -> list[Bucket]:
    """Return the buckets that a device saves, as it updates them: each element is saved by one device.

    Of replicas that own the same elements it is the first, of a tied parameter's copies the first bucket.
    """
    saved: list[Bucket] = []
    written = set[str]()
    _, device = plans.place_in_group(device)  # every group saves its own values
    for bucket in plans.buckets.values():
        names = {piece.name for piece in bucket.pieces}
        if device in bucket.devices and names.isdisjoint(written):
            update = bucket.update
            if device in chain(*update.distinct):
                saved.append(update)
        written |= names
    return saved


def saved_buffers(plans: Plans, device: int) -> list[str]:
    """Return the buffers that a device saves. Of devices that hold the same slice, the first one saves it."""

    def slices(plan: Plan, other: int) -> list[tuple[str, int]]:
        return [(name, slot.sharding.index(slot.position(other))) for name, slot in plan.buffers.items()]

    group, _ = plans.place_in_group(device)
    devices = [(plan, other) for plan in plans for other in plan.devices if other < device]
    same_group = ((plan, other) for plan, other in devices if plans.place_in_group(other)[0] == group)
    earlier = {held for plan, other in same_group for held in slices(plan, other)}
    return [held[0] for held in slices(plans.of(device), device) if held not in earlier]
