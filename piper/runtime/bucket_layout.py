"""Buckets in memory: one flat tensor, seen piece by piece, whole or in the shard that a device owns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piper.ir.sharding import FlatRuns, Sharding, flat_runs, spans_of_dim
from piper.plan.bucket import Bucket, ShardCollective
from piper.plan.expert_table import NOTHING, first_table
from piper.runtime.comm.base import Group

View = tuple[tuple[int, ...], tuple[int, ...], int]  # the shape, the strides and the offset of a piece


class Flat(list[Tensor]):
    """The pieces of a bucket in their shapes, over one flat tensor. A list: kernels index it all the time."""

    __slots__ = ("whole",)

    def __init__(self, whole: Tensor, pieces: Sequence[Tensor]) -> None:
        super().__init__(pieces)
        self.whole = whole


class TrainedPieces:
    """What one device updates of each parameter of a bucket, end to end in one flat tensor."""

    def __init__(self, update: Bucket, device: int) -> None:
        start, stop = update.owned(device)
        self.length, self.names = stop - start, [piece.name for piece in update.pieces]
        whole = not update.zero or bool(update.bounds)
        self.runs = [
            (piece.name, low - start, piece.shape if whole else (high - low,), high - low)
            for piece, low, high in update.pieces_in(start, stop)
        ]

    def segments(self, owned: Tensor) -> list[tuple[str, Tensor]]:
        """Return what this device owns of each piece: in its shape where it is whole, else as a flat run."""
        return [(name, owned[begin : begin + length].view(shape)) for name, begin, shape, length in self.runs]

    def apart(self, owned: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what this device owns, by piece; `owned` is one flat tensor, or a tensor for each piece."""
        if len(owned) == 1:
            return dict(self.segments(owned[0].reshape(-1)))
        return dict(zip(self.names, owned, strict=True))


class Layout:
    """Where a bucket's pieces lie, and which part of it one device owns."""

    def __init__(self, bucket: Bucket, device: int) -> None:
        self.bucket, self.device = bucket, device
        self.position = bucket.devices.index(device)
        self.sums: torch.dtype = getattr(torch, bucket.precision.sum_dtype)
        self.travels: torch.dtype = getattr(torch, bucket.precision.travel_dtype)
        self.length = bucket.elements("whole")
        self.start, self.stop = bucket.owned(device)
        self.held = bucket.held(device)  # of the parameters
        self.index = {piece.name: i for i, piece in enumerate(bucket.pieces)}
        self.views = [view_of(piece.shape, piece.offset) for piece in bucket.pieces]
        self.clones: Clones | None = None
        if bucket.clones:
            self.clones = Clones(bucket, device)
            self.views = self.clones.views

    def over(self, flat: Tensor) -> Flat:
        """Return a flat tensor with its pieces."""
        return Flat(flat, shown(flat, self.views))

    def flatten(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Flat:
        """Copy the gradients of the pieces into one flat tensor; a piece without one counts as zeros."""
        given = [(place, g) for place, g in enumerate(gradients) if g is not None]
        allocate = given[0][1].new_empty if len(given) == len(gradients) else given[0][1].new_zeros
        flat = self.over(allocate(self.bucket.numel, dtype=dtype))
        torch._foreach_copy_([flat[place] for place, _ in given], [g for _, g in given])
        return flat

    def gather(self, group: Group, how: ShardCollective, shard: Tensor, out: Tensor) -> None:
        """Write every member's shard into a flat tensor."""
        if self.clones is not None and how.gets == "whole":
            self.clones.lend(group, shard, out)
        elif self.bucket.bounds:
            group.all_gather_uneven(shard, out, self.bucket.sizes(how, self.device))
        else:
            group.all_gather(shard, out)

    def scatter(self, group: Group, how: ShardCollective, flat: Tensor) -> Tensor:
        """Return this device's shard of the sum of what all members give."""
        if self.clones is not None and how.gives == "whole":
            return self.clones.give_back(group, flat, self.bucket.elements(how.gets))
        if self.bucket.bounds:
            return group.reduce_scatter_uneven(flat, self.bucket.sizes(how, self.device))
        return group.reduce_scatter(flat, self.bucket.elements(how.gets))


def view_of(shape: tuple[int, ...], offset: int) -> View:
    """Return how a piece of a flat bucket is seen."""
    return shape, torch.empty(shape, device="meta").stride(), offset


def shown(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Return the pieces of a flat tensor, in their shapes."""
    start = flat.storage_offset()  # `as_strided` counts from there, and takes half the time of `split`
    return [flat.as_strided(shape, stride, start + offset) for shape, stride, offset in views]


class Clones:
    """The experts of a bucket on one device, its own and copies of others as `table` says for this step."""

    def __init__(self, bucket: Bucket, device: int) -> None:
        group = next(group for group in bucket.inside if device in group)
        self.own, self.slots, self.place = bucket.experts, bucket.experts + bucket.clones, group.index(device)
        self.table = first_table(len(group), self.own, bucket.clones)
        self.held = [view_of(piece.shape, piece.offset) for piece in bucket.pieces]
        self.views = [
            view_of((self.slots, *piece.shape[1:]), piece.offset // self.own * self.slots)
            for piece in bucket.pieces
        ]

    def leaving(self) -> list[list[int]]:
        """Return the own experts that each device of the group has clones of, in the order of its slots."""
        first = self.place * self.own
        mine = range(first, first + self.own)
        return [[e - first for e in slots[self.own :] if e in mine] for slots in self.table.experts]

    def arriving(self) -> list[list[int]]:
        """Return the slots of this device's clones, by the device that owns the expert."""
        slots: list[list[int]] = [[] for _ in self.table.experts]
        for slot, expert in enumerate(self.table.experts[self.place]):
            if slot >= self.own and expert != NOTHING:
                slots[expert // self.own].append(slot)
        return slots

    def lend(self, group: Group, held: Tensor, out: Tensor) -> None:
        """Write a device's own experts, and copies of those that the table says, into a flat tensor."""
        mine, all_slots = shown(held, self.held), shown(out, self.views)
        for piece, own in zip(all_slots, mine, strict=True):
            piece[: self.own] = own
            piece[self.own :] = 0  # a slot without a clone gets no rows
        for slot, row in exchanged(group, mine, self.leaving(), self.arriving()):
            put_row(all_slots, slot, row)

    def give_back(self, group: Group, flat: Tensor, length: int) -> Tensor:
        """Return the gradients of a device's own experts, with those of their clones on other devices."""
        pieces = shown(flat, self.views)
        wide = torch.promote_types(flat.dtype, torch.float32)
        total = torch.zeros(length, dtype=wide, device=flat.device)
        mine = shown(total, self.held)
        for own, piece in zip(mine, pieces, strict=True):
            own.copy_(piece[: self.own])
        for expert, row in exchanged(group, pieces, self.arriving(), self.leaving()):
            put_row(mine, expert, row, add=True)
        return total


def exchanged(
    group: Group, pieces: Sequence[Tensor], gives: Sequence[Sequence[int]], gets: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    """Exchange experts, by member those given and the places of those got. Yield each with its place."""
    rows = torch.cat(
        [one_row(pieces, index) for indices in gives for index in indices] or [one_row(pieces, 0)[:0]]
    )
    parts = group.all_to_all(rows, list(map(len, gives)), list(map(len, gets)))
    for places, part in zip(gets, parts, strict=True):
        yield from zip(places, part, strict=True)


def one_row(pieces: Sequence[Tensor], index: int) -> Tensor:
    """Return all parameters of one expert as a row."""
    return torch.cat([piece[index].reshape(-1) for piece in pieces]).view(1, -1)


def put_row(pieces: Sequence[Tensor], index: int, row: Tensor, *, add: bool = False) -> None:
    """Write a row into the parameters of an expert, or add it to them."""
    places = [piece[index] for piece in pieces]
    for place, part in zip(places, row.split([place.numel() for place in places]), strict=True):
        place.copy_(place + part.view_as(place) if add else part.view_as(place))


def own_slice(value: Tensor, shardings: Sequence[Sharding], position: int) -> Tensor:
    """Return the slice that the device at a position holds of a tensor. Outer axes cut before inner ones."""
    for held in reversed(shardings):
        spans = spans_of_dim(value.shape[held.dim], held, held.degree, held.index(position))
        parts = [value.narrow(held.dim, low, high - low) for low, high in spans]
        value = torch.cat(parts, held.dim) if len(parts) > 1 else parts[0]
    return value


class Resharding:
    """How the slices of some devices make up the parameters that one of them updates in full."""

    def __init__(self, bucket: Bucket, device: int) -> None:
        group = next(group for group in bucket.slices if device in group)
        self.sizes = bucket.slice_sizes(device)  # of what this device gives to each, or gets back
        self.mine = self.sizes[group.index(device)]  # of what each gives to this device
        start, stop = (bound // len(group) for bound in bucket.update.owned(device))
        self.runs = [
            [
                replace(runs, here=runs.here + at, there=runs.there + at * len(group))
                for piece in bucket.pieces
                if start <= (at := piece.offset - start) + start < stop
                for runs in flat_runs(piece.shape, piece.shardings, bucket.devices.index(member))
            ]
            for member in group
        ]

    def assemble(self, group: Group, slices: Tensor) -> Tensor:
        """Return in full what this device updates, given its slices of what all of them update."""
        given = group.all_to_all(slices, self.sizes, [self.mine] * len(self.sizes))
        full = slices.new_empty(self.mine * len(self.sizes))
        for slice_of_all, runs in zip(given, self.runs, strict=True):
            for run in runs:
                runs_of_whole(full, run).copy_(runs_of_slice(slice_of_all, run))
        return full

    def spread(self, group: Group, full: Tensor, slices: Tensor) -> None:
        """Write this device's slices, given in full what it has updated."""
        parts = []
        for runs in self.runs:
            parts.append(slices.new_empty(self.mine))
            for run in runs:
                runs_of_slice(parts[-1], run).copy_(runs_of_whole(full, run))
        for mine, given in zip(slices.split(self.sizes), group.swap(parts, self.sizes), strict=True):
            mine.copy_(given)


def runs_of_slice(slice_of: Tensor, runs: FlatRuns, begin: int = 0) -> Tensor:
    """Return runs where they lie in a flat slice, of which a tensor begins at an element."""
    start = slice_of.storage_offset() + runs.here - begin
    return slice_of.as_strided((runs.count, runs.length), (runs.here_step, 1), start)


def runs_of_whole(whole: Tensor, runs: FlatRuns, begin: int = 0) -> Tensor:
    """Return runs where they lie in a flat whole, of which a tensor begins at an element."""
    start = whole.storage_offset() + runs.there - begin
    return whole.as_strided((runs.count, runs.length), (runs.there_step, 1), start)
