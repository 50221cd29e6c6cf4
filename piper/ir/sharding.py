"""How tensors lie on a mesh: along each axis sharded, replicated or partial. Also as text."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast, get_args

from piper.ir.mesh import EXPERTS, Axis, Mesh, copies_along
from piper.ir.text_fields import BadLineError, name, shown

CollectiveOp = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "max",
    "shift",  # each device gives its value to the next of its group, the last one to the first
    "shift_back",  # and to the one before
    "slice",  # a device keeps its own slice
    "none",  # the value is passed on
]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each device along an axis holds a slice of one dimension: the i-th device the i-th slice.

    blocks: the dimension is that many equal runs end to end, each sharded by itself. A fused query-key-value
    weight has three. Flattening [batch, sequence] with a sharded sequence gives one for each sample.
    zigzag: the i-th device of n holds the i-th and the i-th last of 2 * n slices.
    """

    dim: int
    blocks: int = 1
    zigzag: bool = False

    def at(self, dim: int) -> "Shard":
        """Return the same sharding of another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along an axis holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device along an axis holds a term; the value is their sum, or their maximum."""

    op: Literal["sum", "max"] = "sum"


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The collective operation of a group on one value, forward and backward."""

    axis: str  # TP, CP
    degree: int  # devices in a group
    op: CollectiveOp  # forward
    back: CollectiveOp  # the operation on the gradient
    joined: Shard | None = None  # the dimension whose slices are put together
    cut: Shard | None = None  # the dimension of which each device gets its slice

    @property
    def adjoint(self) -> "Collective":
        """Return the operation on the gradient."""
        return replace(self, op=self.back, back=self.op, joined=self.cut, cut=self.joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """How a tensor lies along one axis, for any mesh that has it. A tensor has one for each such axis."""

    axis: str
    degree: int
    placement: Shard | Replicate = REPLICATE
    partial: bool = False  # replicated, but its gradient is `Partial`: a sum over the devices of the axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding(Shard):
    """A shard along one axis of the devices that hold a tensor, which is known by its degree and stride."""

    degree: int
    stride: int = 1

    @property
    def axis(self) -> Axis:
        """Return the axis along which the slices lie."""
        return Axis(degree=self.degree, stride=self.stride)

    def index(self, position: int) -> int:
        """Return which slice the device at a position of the set holds."""
        return self.axis.coordinate(position)


UNSHARDED = Sharding(dim=0, degree=1)


def refined(mesh: Mesh, placements: Iterable[AxisPlacement]) -> Mesh:
    """Return a mesh as a tensor divides it: an axis where neighbours hold copies of a slice becomes two.

    Along the inner one devices hold the same slice, along the outer one, of the same name, different slices.
    """
    degrees = {held.axis: held.degree for held in placements}
    mesh = mesh.by_expert if EXPERTS in degrees else mesh
    axes: list[Axis] = []
    for axis in mesh.axes:
        copies = degrees.get(copies_along(axis.name), 1)
        if copies > 1:
            axes.append(replace(axis, name=copies_along(axis.name), degree=copies))
        axes.append(replace(axis, degree=axis.degree // copies, stride=axis.stride * copies))
    return replace(mesh, axes=tuple(axes))


def shardings_on(mesh: Mesh, placements: Sequence[AxisPlacement]) -> tuple[Sharding, ...]:
    """Return how the devices of a mesh shard a tensor, the innermost axis first."""
    shards = {held.axis: held.placement for held in placements}
    return tuple(
        Sharding(**asdict(shard), degree=axis.degree, stride=axis.stride)
        for axis in refined(mesh, placements).axes
        if isinstance(shard := shards.get(axis.name), Shard)
    )


def local_sizes(shape: Sequence[int], shardings: Sequence[Sharding]) -> tuple[int, ...]:
    """Return the shape of one device's slice."""
    sizes = list(shape)
    for held in shardings:
        sizes[held.dim] //= held.degree
    return tuple(sizes)


def whole_sizes(shape: Sequence[int], shardings: Sequence[Sharding]) -> tuple[int, ...]:
    """Return the shape of the tensor of which each device has a slice of a shape."""
    sizes = list(shape)
    for held in shardings:
        sizes[held.dim] *= held.degree
    return tuple(sizes)


def spans_of_dim(size: int, shard: Shard, degree: int, index: int) -> list[tuple[int, int]]:
    """Return the ranges of a whole dimension that make up one slice, in the order they lie in it."""
    pieces = 2 * degree if shard.zigzag else degree
    length = size // (shard.blocks * pieces)
    own = [index, pieces - 1 - index] if shard.zigzag else [index]
    starts = [(block * pieces + piece) * length for block in range(shard.blocks) for piece in own]
    return [(start, start + length) for start in starts]


def indices_of_dim(dim: int, size: int, shardings: Sequence[Sharding], position: int) -> list[int]:
    """Return which indices of a whole dimension the device at a position holds, in their local order."""
    # Of two axes that shard one dimension the outer one cuts first, as it does when a model is sharded.
    found = list(range(size))
    for held in reversed(shardings):
        if held.dim == dim:
            spans = spans_of_dim(len(found), held, held.degree, held.index(position))
            found = [found[i] for low, high in spans for i in range(low, high)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRuns:
    """Runs of one length at equal distances, in a flattened slice and in the whole tensor."""

    here: int  # where the first run begins in the slice
    there: int  # and in the whole
    length: int  # of one run
    count: int = 1
    here_step: int = 0  # from one run to the next; 0: there is one run
    there_step: int = 0


def flat_runs(shape: Sequence[int], shardings: Sequence[Sharding], position: int) -> Iterator[FlatRuns]:
    """Yield the contiguous runs of a slice, those at equal distances together. Both tensors are flattened.

    shape: of the slice. A slice along the second dimension of a matrix has one run for each row.
    """
    if not shardings:
        yield FlatRuns(here=0, there=0, length=math.prod(shape))
        return
    whole = whole_sizes(shape, shardings)
    last = max(held.dim for held in shardings)
    inner = math.prod(shape[last + 1 :])
    indices = [indices_of_dim(dim, whole[dim], shardings, position) for dim in range(last + 1)]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(last + 1)]
    blocks = [(indices[last][first], size) for first, size in progressions(indices[last], 1)]
    row = shape[last] * inner  # of the slice
    bases = [
        sum(index * stride for index, stride in zip(outer, strides, strict=False))
        for outer in itertools.product(*indices[:last])
    ]
    for first, count in progressions(bases):
        before = 0
        step = bases[first + 1] - bases[first] if count > 1 else 0
        for start, size in blocks:
            yield FlatRuns(
                here=first * row + before,
                there=bases[first] + start * strides[last],
                length=size * inner,
                count=count,
                here_step=row if count > 1 else 0,
                there_step=step,
            )
            before += size * inner


def progressions(numbers: Sequence[int], apart: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the places of runs of equally spaced numbers: where each begins, and how many it has.

    apart: the space between them. None: any.
    """
    start = 0
    while start < len(numbers):
        end = start + 1
        if end < len(numbers):
            step = numbers[end] - numbers[start] if apart is None else apart
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
        yield start, end - start
        start = end


def show_shard(shard: Shard | None) -> str:
    """Write which dimension is sharded: `1`, `0/3` in three blocks, `1z` in a zigzag."""
    if shard is None:
        return "-"
    return f"{shard.dim}" + (f"/{shard.blocks}" if shard.blocks > 1 else "") + "z" * shard.zigzag


def read_shard(text: str) -> Shard | None:
    """Read a sharded dimension. None: it is not sharded."""
    if text == "-":
        return None
    dim, _, blocks = text.removesuffix("z").partition("/")
    return Shard(dim=int(dim), blocks=int(blocks or 1), zigzag=text.endswith("z"))


def show_shardings(shardings: Sequence[Sharding]) -> str:
    """Write how a set of devices shards a tensor: `0:2` in two, `1:4*2` in four, two devices apart."""
    return "+".join(
        f"{show_shard(held)}:{held.degree}" + (f"*{held.stride}" if held.stride > 1 else "")
        for held in shardings
    )


def read_shardings(text: str) -> tuple[Sharding, ...]:
    """Read how a set of devices shards a tensor."""
    found = []
    for part in text.split("+") if text else ():
        shard, _, axis = part.partition(":")
        degree, _, stride = axis.partition("*")
        held = read_shard(shard)
        if held is None:
            raise BadLineError(f"{part!r} shards no dimension")
        found.append(Sharding(**asdict(held), degree=int(degree), stride=int(stride or 1)))
    return tuple(found)


def read_sharding(text: str) -> Sharding:
    """Read how a set of devices shards a tensor along one dimension."""
    (held,) = read_shardings(text)
    return held


def show_collective(how: Collective) -> str:
    """Return the text of a collective inside a region."""
    dims = f"{show_shard(how.joined)}>{show_shard(how.cut)}"
    return f"{shown(how.axis)} {how.degree} {how.op} {how.back} {dims}"


def read_collective(text: str) -> Collective:
    axis, degree, op, back, dims = text.rsplit(" ", 4)
    joined, _, cut = dims.partition(">")
    if op not in get_args(CollectiveOp) or back not in get_args(CollectiveOp):
        raise BadLineError(f"there is no collective {op!r} with {back!r} as its backward")
    return Collective(
        axis=name(axis),
        degree=int(degree),
        op=cast(CollectiveOp, op),
        back=cast(CollectiveOp, back),
        joined=read_shard(joined),
        cut=read_shard(cut),
    )
