"""Describes how a set of devices divides a tensor: the dimension, the slices, and which device has which."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

CollectiveOp = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "max",
    "shift",  # each device gives its value to the next of its group, the last one to the first
    "shift_back",  # and to the one before
    "slice",  # a device keeps its own part
    "none",  # the value is passed on
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """The dimension of a tensor that a group of devices divides.

    blocks: the dimension is that many equal runs end to end, each divided by itself. zigzag: the i-th
    device of n holds the i-th and the i-th last of 2 * n slices.
    """

    dim: int
    blocks: int = 1
    zigzag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The collective operation of a group on one value, forward and backward."""

    axis: str  # of the directive that divides: TP, CP
    degree: int  # devices in a group
    op: CollectiveOp  # forward
    back: CollectiveOp  # the operation on the gradient
    joined: Slicing | None = None  # the dimension whose parts are put together
    cut: Slicing | None = None  # the dimension of which each device gets its part

    @property
    def adjoint(self) -> "Collective":
        """Return the operation on the gradient."""
        return replace(self, op=self.back, back=self.op, joined=self.cut, cut=self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding(Slicing):
    """A division over all devices of a set: the device at position p holds slice p // stride % ways."""

    ways: int
    stride: int = 1

    def index(self, position: int) -> int:
        """Return which slice the device at a position of the set holds."""
        return position // self.stride % self.ways


WHOLE = Sharding(dim=0, ways=1)


def local_sizes(shape: Sequence[int], shardings: Sequence[Sharding]) -> tuple[int, ...]:
    """Return the shape of one device's slice."""
    sizes = list(shape)
    for held in shardings:
        sizes[held.dim] //= held.ways
    return tuple(sizes)


def whole_sizes(shape: Sequence[int], shardings: Sequence[Sharding]) -> tuple[int, ...]:
    """Return the shape of the tensor of which each device has a slice of a shape."""
    sizes = list(shape)
    for held in shardings:
        sizes[held.dim] *= held.ways
    return tuple(sizes)


def spans_of_dim(size: int, slicing: Slicing, ways: int, index: int) -> list[tuple[int, int]]:
    """Return the ranges of a whole dimension that make up one slice, in the order they lie in it."""
    pieces = 2 * ways if slicing.zigzag else ways
    length = size // (slicing.blocks * pieces)
    own = [index, pieces - 1 - index] if slicing.zigzag else [index]
    starts = [(block * pieces + piece) * length for block in range(slicing.blocks) for piece in own]
    return [(start, start + length) for start in starts]


def indices_of_dim(dim: int, size: int, shardings: Sequence[Sharding], position: int) -> list[int]:
    """Return which indices of a whole dimension the device at a position holds, in their local order."""
    found = list(range(size))
    for held in shardings:
        if held.dim == dim:
            spans = spans_of_dim(len(found), held, held.ways, held.index(position))
            found = [found[i] for low, high in spans for i in range(low, high)]
    return found


def runs(
    shape: Sequence[int], shardings: Sequence[Sharding], position: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the contiguous runs of a slice: the start in the slice, the start in the whole, the length.

    shape: of the slice. Both tensors are flattened.
    """
    whole = whole_sizes(shape, shardings)
    if not shardings:
        yield 0, 0, math.prod(shape)
        return
    last = max(held.dim for held in shardings)
    inner = math.prod(shape[last + 1 :])
    indices = [indices_of_dim(dim, whole[dim], shardings, position) for dim in range(last + 1)]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(last + 1)]
    blocks = list(_blocks(indices[last]))
    local = 0
    for outer in itertools.product(*indices[:last]):
        base = sum(index * stride for index, stride in zip(outer, strides, strict=False))
        for first, count in blocks:
            yield local, base + first * strides[last], count * inner
            local += count * inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Comb:
    """Runs of one length at equal distances, in a flattened slice and in the whole tensor."""

    here: int  # where the first run begins in the slice
    there: int  # and in the whole
    length: int  # of one run
    count: int = 1
    here_step: int = 0  # from one run to the next; 0: there is one run
    there_step: int = 0


def combs(shape: Sequence[int], shardings: Sequence[Sharding], position: int) -> Iterator[Comb]:
    """Yield the contiguous runs of a slice, those at equal distances together.

    shape: of the slice. A slice along the second dimension of a matrix is one comb with a run for each row.
    """
    if not shardings:
        yield Comb(here=0, there=0, length=math.prod(shape))
        return
    whole = whole_sizes(shape, shardings)
    last = max(held.dim for held in shardings)
    inner = math.prod(shape[last + 1 :])
    indices = [indices_of_dim(dim, whole[dim], shardings, position) for dim in range(last + 1)]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(last + 1)]
    blocks = list(_blocks(indices[last]))
    row = shape[last] * inner  # of the slice
    bases = [
        sum(index * stride for index, stride in zip(outer, strides, strict=False))
        for outer in itertools.product(*indices[:last])
    ]
    for first, count in progressions(bases):
        before = 0
        step = bases[first + 1] - bases[first] if count > 1 else 0
        for start, size in blocks:
            yield Comb(
                here=first * row + before,
                there=bases[first] + start * strides[last],
                length=size * inner,
                count=count,
                here_step=row if count > 1 else 0,
                there_step=step,
            )
            before += size * inner


def progressions(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the places of runs of equally spaced numbers: where each begins, and how many it has."""
    start = 0
    while start < len(numbers):
        end = start + 1
        if end < len(numbers):
            step = numbers[end] - numbers[start]
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
        yield start, end - start
        start = end


def _blocks(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of neighbouring numbers: the first of each, and how many."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[start], i - start
            start = i
