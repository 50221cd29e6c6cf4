"""Stand-ins for the parameters of each device's optimizer, without memory or in miniature."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from piper.ir.sharding import Sharding, local_sizes, whole_sizes
from piper.plan.updates import BucketUpdate
from piper.runtime.bucket_layout import own_slice

Sizes = Mapping[str, tuple[int, ...]]
MOST_SHARDS, MOST_WAYS = 3, 2  # into which a miniature is cut: it has few elements
LARGEST = 8  # along one axis of a miniature


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A device's part of one parameter: all, a slice of it, or a flat run of either."""

    name: str
    shardings: tuple[Sharding, ...] = ()  # empty: the device holds all of it, before ZeRO
    position: int = 0  # of the device among those that shard it
    run: tuple[int, int] | None = None  # of the flattened slice; None: all of it, in its shape

    def of(self, value: Tensor) -> Tensor:
        """Return this part of a parameter or of its gradient."""
        value = own_slice(value, self.shardings, self.position)
        return value if self.run is None else value.reshape(-1)[self.run[0] : self.run[1]]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a parameter."""
        return local_sizes(whole, self.shardings) if self.run is None else (self.run[1] - self.run[0],)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The parameters of one device's optimizer, in order."""

    device: int
    parts: tuple[ParameterPart, ...]


def classes_of(buckets: Iterable[BucketUpdate]) -> list[tuple[tuple[int, ...], tuple[BucketUpdate, ...]]]:
    """Return the devices that hold the same trained buckets, with these buckets, in the order of the plan."""
    by_device: dict[int, list[BucketUpdate]] = {}
    for bucket in buckets:
        if bucket.trainable:
            for device in bucket.devices:
                by_device.setdefault(device, []).append(bucket)
    classes: dict[tuple[str, ...], tuple[list[int], tuple[BucketUpdate, ...]]] = {}
    for device, mine in by_device.items():
        classes.setdefault(tuple(b.name for b in mine), ([], tuple(mine)))[0].append(device)
    return [(tuple(devices), mine) for devices, mine in classes.values()]


def view_of(device: int, buckets: Iterable[BucketUpdate], sizes: Sizes) -> View:
    """Return what the optimizer of a device is given of these buckets, whose parameters have these sizes."""
    parts: list[ParameterPart] = []
    for bucket in buckets:
        shard = bucket.rank(device), bucket.group_size
        parts += cut(bucket, sizes, shard, bucket.devices.index(device))
    return View(device=device, parts=tuple(parts))


def small_views(device: int, buckets: Sequence[BucketUpdate], sizes: Sizes) -> Iterator[View]:
    """Yield what devices like this one are given in miniature: one view for each rank among few shards.

    Every parameter of a sharded bucket is cut, so that a shard's border lies inside each of them.
    """

    def cuts(bucket: BucketUpdate) -> tuple[int, int]:
        slices = max(MOST_WAYS ** len(piece.shardings) for piece in bucket.pieces)
        return min(bucket.group_size, MOST_SHARDS) if bucket.zero else 1, slices

    for number in range(max(math.prod(cuts(bucket)) for bucket in buckets)):
        parts: list[ParameterPart] = []
        for bucket in buckets:
            shards, slices = cuts(bucket)
            for piece in bucket.pieces:
                small = replace(piece, shardings=small_shardings(piece.shardings))
                alone = replace(bucket, pieces=(small,))
                parts += cut(alone, sizes, (number // slices % shards, shards), number % slices)
        yield View(device=device, parts=tuple(parts))


def cut(bucket: BucketUpdate, sizes: Sizes, shard: tuple[int, int], position: int) -> Iterator[ParameterPart]:
    """Yield what a device holds of a bucket whose parameters have these sizes.

    shard: the device's place among the shards, and of how many. position: among those that slice parameters.
    """
    slices = [
        ParameterPart(name=piece.name, shardings=piece.shardings, position=position if piece.shardings else 0)
        for piece in bucket.pieces
    ]
    if not bucket.zero:
        yield from slices
        return
    if bucket.bounds:
        for piece, part in zip(bucket.pieces, slices, strict=True):
            if bucket.owner(piece) % shard[1] == shard[0]:
                yield part
        return
    lengths = [math.prod(part.shape(sizes[part.name])) for part in slices]
    own = -(-sum(lengths) // shard[1])
    start, offset = shard[0] * own, 0
    for part, length in zip(slices, lengths, strict=True):
        low, high = max(offset, start), min(offset + length, start + own)
        if low < high:
            yield replace(part, run=(low - offset, high - offset))
        offset += length


def whole_view(names: Iterable[str]) -> View:
    """Return what an optimizer is given in plain PyTorch: every parameter, whole, in the model's order."""
    return View(device=-1, parts=tuple(ParameterPart(name=name) for name in names))


def hollow(view: View, sizes: Sizes) -> list[tuple[str, Tensor]]:
    """Return the names of a view's parts, with tensors of their true shapes that take no memory."""
    mode, device = FakeTensorMode(), torch.device("cpu")

    def empty(shape: tuple[int, ...]) -> Tensor:  # `torch.empty` in the mode takes three times as long
        tensor: Tensor = FakeTensor(mode, torch.empty(shape, device="meta"), device)
        return tensor.requires_grad_()

    return [(part.name, empty(part.shape(sizes[part.name]))) for part in view.parts]


def true_sizes(buckets: Iterable[BucketUpdate]) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of the parameters in these buckets."""
    pieces = (piece for bucket in buckets for piece in bucket.pieces)
    return {piece.name: whole_sizes(piece.shape, piece.shardings) for piece in pieces}


def small_shardings(shardings: Sequence[Sharding]) -> tuple[Sharding, ...]:
    """Return the shardings of a parameter in miniature, along the same dimensions: few ways, in order."""
    return tuple(
        Sharding(dim=each.dim, degree=MOST_WAYS, stride=MOST_WAYS**number)
        for number, each in enumerate(shardings)
    )


def small_sizes(sizes: Sizes, buckets: Iterable[BucketUpdate]) -> dict[str, tuple[int, ...]]:
    """Return small shapes with as many axes: axes that differ in size still do, in the same order."""
    shardings = {piece.name: piece.shardings for bucket in buckets for piece in bucket.pieces}
    local = {name: local_sizes(shape, shardings.get(name, ())) for name, shape in sizes.items()}
    distinct = sorted({size for shape in local.values() for size in shape if size > 1})
    small = {0: 0, 1: 1} | {size: min(place + 2, LARGEST) for place, size in enumerate(distinct)}
    return {
        name: whole_sizes([small[size] for size in shape], small_shardings(shardings.get(name, ())))
        for name, shape in local.items()
    }
