"""Stand-ins for the parameters of each device's optimizer, without memory or in miniature."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from piper.plan.plan import Bucket

Sizes = Mapping[str, tuple[int, ...]]
MOST_SHARDS, MOST_WAYS = 3, 2  # into which a miniature is cut: it has few elements
LARGEST = 8  # along one axis of a miniature


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """A device's part of one parameter: all, some of its experts, or a flat run of those."""

    name: str
    rows: tuple[int, int] | None = None  # of the first axis; None: all
    run: tuple[int, int] | None = None  # of the flattened rows; None: all, in their shape

    def of(self, value: Tensor) -> Tensor:
        """Return this part of a parameter or of its gradient."""
        if self.rows is not None:
            value = value[self.rows[0] : self.rows[1]]
        return value if self.run is None else value.reshape(-1)[self.run[0] : self.run[1]]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a parameter."""
        if self.run is not None:
            return (self.run[1] - self.run[0],)
        return whole if self.rows is None else (self.rows[1] - self.rows[0], *whole[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The parameters of one device's optimizer, in order."""

    device: int
    parts: tuple[ParameterPart, ...]


def classes_of(buckets: Iterable[Bucket]) -> list[tuple[tuple[int, ...], tuple[Bucket, ...]]]:
    """Return the devices that hold the same trained buckets, with these buckets, in the order of the plan."""
    held: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        if bucket.trainable:
            for device in bucket.devices:
                held.setdefault(device, []).append(bucket)
    classes: dict[tuple[str, ...], tuple[list[int], tuple[Bucket, ...]]] = {}
    for device, mine in held.items():
        classes.setdefault(tuple(b.name for b in mine), ([], tuple(mine)))[0].append(device)
    return [(tuple(devices), mine) for devices, mine in classes.values()]


def view_of(device: int, buckets: Iterable[Bucket], sizes: Sizes) -> View:
    """Return what the optimizer of a device is given of these buckets, whose parameters have these sizes."""
    parts: list[ParameterPart] = []
    for bucket in buckets:
        position = bucket.devices.index(device)
        rank = next(group for group in bucket.groups if device in group).index(device)
        parts += cut(
            bucket, sizes, (rank, bucket.group_size), (position % len(bucket.groups), len(bucket.groups))
        )
    return View(device=device, parts=tuple(parts))


def small_views(device: int, buckets: Sequence[Bucket], sizes: Sizes) -> Iterator[View]:
    """Yield what devices like this one are given in miniature: one view for each rank among few shards.

    Every parameter of a sharded bucket is cut, so that a shard's border lies inside each of them.
    """

    def cuts(bucket: Bucket) -> tuple[int, int]:
        return min(bucket.group_size, MOST_SHARDS) if bucket.zero else 1, min(len(bucket.groups), MOST_WAYS)

    for number in range(max(math.prod(cuts(bucket)) for bucket in buckets)):
        parts: list[ParameterPart] = []
        for bucket in buckets:
            shards, ways = cuts(bucket)
            for piece in bucket.pieces:
                alone = replace(bucket, pieces=(piece,))
                parts += cut(alone, sizes, (number // ways % shards, shards), (number % ways, ways))
        yield View(device=device, parts=tuple(parts))


def cut(
    bucket: Bucket, sizes: Sizes, shard: tuple[int, int], expert: tuple[int, int]
) -> Iterator[ParameterPart]:
    """Yield what a device holds of a bucket whose parameters have these sizes.

    shard, expert: the device's place and of how many, among the shards and among the sharded experts.
    """
    rows: dict[str, tuple[int, int]] = {}
    lengths: dict[str, int] = {}
    for piece in bucket.pieces:
        shape = sizes[piece.name]
        if expert[1] > 1:
            some = shape[0] // expert[1]
            rows[piece.name] = (expert[0] * some, (expert[0] + 1) * some)
        lengths[piece.name] = math.prod(shape) // expert[1]
    if not bucket.zero:
        for piece in bucket.pieces:
            yield ParameterPart(name=piece.name, rows=rows.get(piece.name))
        return
    if bucket.bounds:
        for piece in bucket.pieces:
            if bucket.owner(piece) % shard[1] == shard[0]:
                yield ParameterPart(name=piece.name, rows=rows.get(piece.name))
        return
    own = -(-sum(lengths.values()) // shard[1])
    start, offset = shard[0] * own, 0
    for name, length in lengths.items():
        low, high = max(offset, start), min(offset + length, start + own)
        if low < high:
            yield ParameterPart(name=name, rows=rows.get(name), run=(low - offset, high - offset))
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


def true_sizes(buckets: Iterable[Bucket]) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of the parameters in these buckets."""
    return {
        piece.name: (piece.shape[0] * len(bucket.groups), *piece.shape[1:])
        if len(bucket.groups) > 1
        else piece.shape
        for bucket in buckets
        for piece in bucket.pieces
    }


def small_sizes(sizes: Sizes, buckets: Iterable[Bucket]) -> dict[str, tuple[int, ...]]:
    """Return small shapes with as many axes: axes that differ in size still do, in the same order."""
    ways = {
        piece.name: len(bucket.groups)
        for bucket in buckets
        for piece in bucket.pieces
        if len(bucket.groups) > 1
    }
    local = {
        name: (shape[0] // ways[name], *shape[1:]) if name in ways else shape for name, shape in sizes.items()
    }
    distinct = sorted({size for shape in local.values() for size in shape if size > 1})
    small = {0: 0, 1: 1} | {size: min(place + 2, LARGEST) for place, size in enumerate(distinct)}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in local.items():
        reduced = tuple(small[size] for size in shape)
        found[name] = (reduced[0] * MOST_WAYS, *reduced[1:]) if name in ways else reduced
    return found
