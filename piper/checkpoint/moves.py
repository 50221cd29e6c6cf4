"""Moves of a job's state from the layout of one program to that of another: a plan, priced and proven.

[Note: moves] Programs of one job may hold a parameter differently: sharded by ZeRO or not, sliced over an
axis or not, in other groups. When a step needs another layout than the last one, each device gets its part
from the devices that have it. Two extents of a parameter move: what chunks compute with, which is `held`,
and what the optimizer trains and keeps, which is `owned`. Devices that have the same part are a share. All
shares of a layout together have every element, and no two of them the same, so each element comes from one
share, and from the member that is nearest. Buckets that lie alike in both layouts do not move. The others
move one by one, and one that no later move reads is given up: a device has both layouts of few at a time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from piper.checkpoint.bucket_spans import common_runs, length_of, piece_runs
from piper.ir.devices import Devices
from piper.ir.grouping import grouped
from piper.ir.ids import param_slot
from piper.ir.sharding import FlatRuns
from piper.plan.bucket import Bucket
from piper.plan.instr import Instr
from piper.plan.ops import OfBucket
from piper.plan.plan import Comm, Plan, Plans
from piper.plan.updates import Piece

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
NONE: Numbers = np.zeros((3, 0), dtype=np.int64)
ALL = "all"  # the communicator of every device
KNOWN = 4096  # pairs of placements whose transfers are kept: equal layers have the same


@dataclass(frozen=True)
class PlacedPiece:
    """A parameter in a bucket, and which elements of the bucket each device has."""

    piece: Piece  # without its name, so that those of equal layers are equal
    devices: Devices
    ranges: tuple[tuple[int, int], ...]  # by device

    @cached_property
    def shares(self) -> tuple[tuple[Devices, tuple[FlatRuns, ...]], ...]:
        """Return the devices that have the same part of the parameter, and its runs. Parts are not empty."""
        cuts = [tuple(each.index(at) for each in self.piece.shardings) for at in range(len(self.devices))]
        same = grouped((held, i) for i, held in enumerate(zip(cuts, self.ranges, strict=True)))
        shares = [(positions, self.runs(positions[0])) for positions in same.values()]
        return tuple((tuple(self.devices[p] for p in places), runs) for places, runs in shares if runs)

    def runs(self, position: int) -> tuple[FlatRuns, ...]:
        """Return what the device at a position has: `here` in the bucket, `there` in the parameter."""
        return tuple(piece_runs(self.piece, position, *self.ranges[position]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRuns:
    """Elements of a parameter that one device gives another, or keeps where both are the same."""

    source: int
    target: int
    runs: tuple[FlatRuns, ...]  # `here` in the bucket that they leave, `there` in the one that they enter


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMove:
    """How one parameter gets into a bucket, from the one that has had it."""

    name: str
    before: Bucket
    held: tuple[MovedRuns, ...]
    owned: tuple[MovedRuns, ...]  # empty: it is not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMove:
    """How the parameters of one bucket get there, with what the optimizer keeps for them."""

    bucket: Bucket
    pieces: tuple[PieceMove, ...]


def moves_between(before: Mapping[str, Bucket], after: Mapping[str, Bucket]) -> list[BucketMove]:
    """Return how the state moves from some buckets to others, which have the same parameters."""
    holders: dict[str, tuple[Bucket, Piece]] = {}
    for bucket in before.values():
        for piece in bucket.pieces:
            holders.setdefault(piece.name, (bucket, piece))  # of the copies of a tied one, the first
    return [
        BucketMove(bucket=bucket, pieces=tuple(piece_moves(bucket, holders)))
        for bucket in after.values()
        if not lies_in(bucket, before)
    ]


def lies_in(bucket: Bucket, others: Mapping[str, Bucket]) -> bool:
    """Return whether a bucket lies as one of another layout, so that it does not move."""
    return any(bucket.lies_as(other) for other in others.values())


def last_reads(moves: Sequence[BucketMove]) -> list[list[str]]:
    """Return after each move the buckets of the layout before that no later move reads."""
    last = {piece.before.name: number for number, move in enumerate(moves) for piece in move.pieces}
    return [[name for name, at in last.items() if at == number] for number in range(len(moves))]


def piece_moves(bucket: Bucket, holders: Mapping[str, tuple[Bucket, Piece]]) -> Iterator[PieceMove]:
    """Yield how each parameter gets into a bucket. holders: where each was, by name."""
    whole = {piece.name: piece for piece in bucket.update.pieces}
    for piece in bucket.pieces:
        old, old_piece = holders[piece.name]
        owned: tuple[MovedRuns, ...] = ()
        if bucket.trainable:
            (trained,) = (each for each in old.update.pieces if each.name == piece.name)
            owned = transfers(placed(old, trained, "owned"), placed(bucket, whole[piece.name], "owned"))
        held = transfers(placed(old, old_piece, "held"), placed(bucket, piece, "held"))
        yield PieceMove(name=piece.name, before=old, held=held, owned=owned)


def placed(bucket: Bucket, piece: Piece, extent: Literal["held", "owned"]) -> PlacedPiece:
    """Return which part of a parameter each device of a bucket holds, or updates."""
    part = bucket.held if extent == "held" else bucket.update.owned
    ranges = tuple(map(part, bucket.devices))
    return PlacedPiece(piece=replace(piece, name=""), devices=bucket.devices, ranges=ranges)


@lru_cache(maxsize=KNOWN)
def transfers(before: PlacedPiece, after: PlacedPiece) -> tuple[MovedRuns, ...]:
    """Return what devices give each other so that each has its part of a parameter, proven."""
    moved = tuple(
        MovedRuns(source=nearest(having, device), target=device, runs=runs)
        for wanting, wanted in after.shares
        for having, had in before.shares
        if (runs := tuple(met for one in had for other in wanted for met in common_runs(one, other)))
        for device in wanting
    )
    prove_transfers(before, after, moved)
    return moved


def nearest(having: Devices, device: int) -> int:
    """Return which of several devices gives a part to another: itself, or one of the same machine if any is.

    Numbers that differ in their last binary digits alone lie in the same machine, however large machines are.
    """
    return min(having, key=lambda other: other ^ device)


def prove_transfers(before: PlacedPiece, after: PlacedPiece, moved: Sequence[MovedRuns]) -> None:
    """Prove, without `common_runs`, that a device gets each element of its part once, from one with it."""
    having = {device: one_by_one(before.runs(place)) for place, device in enumerate(before.devices)}
    for place, device in enumerate(after.devices):
        wanted = one_by_one(after.runs(place))
        arrived = [(one.source, one_by_one(one.runs)) for one in moved if one.target == device]
        entered = np.hstack([NONE[1:], *(runs[1:] for _, runs in arrived)])
        if not np.array_equal(joined(entered), joined(wanted[[0, 2]])):
            raise AssertionError(f"device {device} gets other elements than those of its part")
        for source, (here, there, length) in arrived:
            given, needed = elements(having[source], here, length), elements(wanted, there, length)
            if (given < 0).any() or not np.array_equal(given, needed):
                raise AssertionError(f"device {source} gives device {device} other elements than it needs")


def one_by_one(several: Iterable[FlatRuns]) -> Numbers:
    """Return runs one by one as [here, there, length], in the order of `here`."""
    rows = [NONE]
    for runs in several:
        numbers = np.arange(runs.count, dtype=np.int64)
        here, there = runs.here + runs.here_step * numbers, runs.there + runs.there_step * numbers
        rows.append(np.stack([here, there, np.full_like(numbers, runs.length)]))
    whole = np.hstack(rows)
    return whole[:, np.argsort(whole[0], kind="stable")]


def elements(runs: Numbers, at: Numbers, length: Numbers) -> Numbers:
    """Return where stretches that begin `here` at some places lie `there`. -1: they lie in no run."""
    here, there, lengths = runs
    if not len(here):
        return np.full(len(at), -1)
    run = np.searchsorted(here, at, side="right") - 1
    inside = (run >= 0) & (at + length <= here[run] + lengths[run])
    return np.where(inside, there[run] + at - here[run], -1)


def joined(stretches: Numbers) -> Numbers:
    """Return stretches of [begin, length] as [begin, end], with those end to end as one. -1: some overlap."""
    begin, length = stretches[:, np.argsort(stretches[0], kind="stable")]
    ends = begin + length
    if (begin[1:] < ends[:-1]).any():
        return np.full((2, 1), -1)
    apart = np.flatnonzero(begin[1:] != ends[:-1])
    firsts, lasts = np.append(0, apart + 1), np.append(apart, len(begin) - 1)
    return np.stack([begin[firsts], ends[lasts]]) if len(begin) else stretches


def moving_plans(
    before: Mapping[str, Bucket], after: Mapping[str, Bucket], devices: Devices, state_bytes: int
) -> Plans:
    """Return the plan of a move from some buckets to others, for the simulator and for people.

    An instruction moves one bucket. Its bytes are those of the device that sends or gets most.
    """
    instrs = []
    for move in moves_between(before, after):
        name = move.bucket.name
        instrs.append(
            Instr(
                op="reshard",
                node=f"move {name}",
                stream="move",
                reads=tuple(dict.fromkeys(param_slot(piece.before.name) for piece in move.pieces)),
                writes=(param_slot(name),),
                comm=ALL if len(devices) > 1 else None,
                payload=OfBucket(bucket=name),
                nbytes=most_bytes(move, state_bytes),
            )
        )
    plan = Plan(devices=devices, instrs=tuple(instrs), slots={}, residents={})
    everyone = Comm(name=ALL, kind="groups", groups=(devices,))
    return Plans(plans=(plan,), comms={ALL: everyone}, buckets=after, seed=1.0, weighted=False)


def most_bytes(move: BucketMove, state_bytes: int) -> int:
    """Return the bytes that one device sends or gets for a bucket, at most."""
    sent, arrived = Counter[int](), Counter[int]()
    for piece in move.pieces:
        kept = max(bucket.kept_itemsize(state_bytes) for bucket in (piece.before, move.bucket))
        for moved, itemsize in ((piece.held, move.bucket.itemsize), (piece.owned, kept)):
            for one in (one for one in moved if one.source != one.target):
                sent[one.source] += length_of(one.runs) * itemsize
                arrived[one.target] += length_of(one.runs) * itemsize
    return max((*sent.values(), *arrived.values()), default=0)


def peak_while_moving(before: Plans, after: Plans, state_bytes: int) -> int:
    """Return the most bytes that a device has while the state moves, bucket by bucket, to another layout."""
    moves = moves_between(before.buckets, after.buckets)
    exchanges = [most_bytes(move, state_bytes) for move in moves]
    steps = [*zip(moves, exchanges, last_reads(moves), strict=True)]
    moving = [bucket for bucket in before.buckets.values() if not lies_in(bucket, after.buckets)]
    numbers = [{d: n for n, plan in enumerate(plans) for d in plan.devices} for plans in (before, after)]
    peak = 0
    for device in {tuple(of[device] for of in numbers): device for device in before.devices}.values():

        def bytes_of(bucket: Bucket, device: int = device) -> int:
            mine = device in bucket.devices
            return bucket.held_nbytes + bucket.kept_nbytes(state_bytes) if mine else 0

        live = sum(slot.nbytes for slot in before.of(device).residents.values())
        for move, exchanged, done in steps:
            live += bytes_of(move.bucket)
            peak = max(peak, live + 2 * exchanged)
            live -= sum(bytes_of(bucket) for bucket in moving if bucket.name in done)
    return peak
