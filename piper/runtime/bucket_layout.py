"""Buckets in memory: one flat tensor, seen piece by piece, whole or in the shard that a device owns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from piper.ir.sharding import Sharding, spans_of_dim
from piper.plan.bucket import Bucket, ShardCollective
from piper.runtime.comm.base import Group


class Flat(list[Tensor]):
    """The pieces of a bucket in their shapes, over one flat tensor. A list: kernels index it all the time."""

    __slots__ = ("whole",)

    def __init__(self, whole: Tensor, pieces: Sequence[Tensor]) -> None:
        super().__init__(pieces)
        self.whole = whole


class Layout:
    """Where a bucket's pieces lie, and which part of it one device owns."""

    def __init__(self, bucket: Bucket, device: int) -> None:
        self.bucket, self.device = bucket, device
        self.position = bucket.devices.index(device)
        self.sharded = bucket.zero > 0
        self.sums: torch.dtype = getattr(torch, bucket.precision.sum_dtype)
        self.travels: torch.dtype = getattr(torch, bucket.precision.travel_dtype)
        self.length = bucket.elements("whole")
        self.start, self.stop = bucket.owned(device)
        self.held = bucket.held(device)  # of the parameters
        self._sizes: dict[tuple[str, str], list[int]] = {}  # of the shards in each collective, if they differ
        self.shapes = [piece.shape for piece in bucket.pieces]
        self.index = {piece.name: i for i, piece in enumerate(bucket.pieces)}
        shown = [(piece.shape, torch.empty(piece.shape, device="meta").stride()) for piece in bucket.pieces]
        self.views = [(*how, piece.offset) for how, piece in zip(shown, bucket.pieces, strict=True)]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return the pieces of a flat bucket, in their shapes."""
        start = flat.storage_offset()  # `as_strided` counts from there, and takes half the time of `split`
        return [flat.as_strided(shape, stride, start + offset) for shape, stride, offset in self.views]

    def over(self, flat: Tensor) -> Flat:
        """Return a flat tensor with its pieces."""
        return Flat(flat, self.pieces(flat))

    def flatten(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Flat:
        """Copy the gradients of the pieces into one flat tensor; a piece without one counts as zeros."""
        like = next(g for g in gradients if g is not None)
        flat = self.over(like.new_empty(self.bucket.numel, dtype=dtype))
        given = [(piece, g) for piece, g in zip(flat, gradients, strict=True) if g is not None]
        torch._foreach_copy_([piece for piece, _ in given], [g for _, g in given])
        for piece, g in zip(flat, gradients, strict=True):
            if g is None:
                piece.zero_()
        return flat

    def owned(self, flat: Tensor) -> Tensor:
        """Return the part of a flat bucket that this device updates."""
        return flat[self.start : self.stop]

    def segments(self, owned: Tensor) -> list[tuple[str, Tensor]]:
        """Return what this device owns of each piece: in its shape where it is whole, else as a flat run."""
        owned_pieces = []
        for piece in self.bucket.pieces:
            low, high = max(piece.offset, self.start), min(piece.offset + piece.numel, self.stop)
            if low >= high:
                continue
            run = owned[low - self.start : high - self.start]
            whole = not self.sharded or self.bucket.bounds
            owned_pieces.append((piece.name, run.view(piece.shape) if whole else run))
        return owned_pieces

    def apart(self, owned: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what this device owns, by piece; `owned` is one flat tensor, or a tensor for each piece."""
        if len(owned) == 1:
            return dict(self.segments(owned[0].reshape(-1)))
        return dict(zip(self.index, owned, strict=True))

    def sizes(self, how: ShardCollective) -> list[int]:
        """Return the elements of the shard of each device that takes part with this one."""
        key = (how.gives, how.gets)
        if key not in self._sizes:
            self._sizes[key] = self.bucket.sizes(how, self.device)
        return self._sizes[key]

    def gather(self, group: Group, how: ShardCollective, shard: Tensor, out: Tensor) -> None:
        """Write every member's shard into a flat tensor."""
        if self.bucket.bounds:
            group.all_gather_uneven(shard, out, self.sizes(how))
        else:
            group.all_gather(shard, out)

    def scatter(self, group: Group, how: ShardCollective, flat: Tensor) -> Tensor:
        """Return this device's shard of the sum of what all members give."""
        if self.bucket.bounds:
            return group.reduce_scatter_uneven(flat, self.sizes(how))
        return group.reduce_scatter(flat, self.bucket.elements(how.gets))

    def local(self, value: Tensor, index: int) -> Tensor:
        """Return what this device holds of a full parameter: its own slice, where it is sharded."""
        return own_slice(value, self.bucket.pieces[index].shardings, self.position)


def own_slice(value: Tensor, shardings: Sequence[Sharding], position: int) -> Tensor:
    """Return the slice that the device at a position holds of a tensor. Outer axes cut before inner ones."""
    for held in reversed(shardings):
        spans = spans_of_dim(value.shape[held.dim], held, held.degree, held.index(position))
        parts = [value.narrow(held.dim, low, high - low) for low, high in spans]
        value = torch.cat(parts, held.dim) if len(parts) > 1 else parts[0]
    return value
