"""The text form of divided tensors: shardings, slicings and the collectives between them."""

from collections.abc import Sequence
from typing import cast, get_args

from piper.ir.sharding import Collective, CollectiveOp, Sharding, Slicing
from piper.ir.text_fields import BadLineError, name, shown


def show_slicing(slicing: Slicing | None) -> str:
    """Write which dimension is divided: `1`, `0/3` in three blocks, `1z` in a zigzag."""
    if slicing is None:
        return "-"
    return f"{slicing.dim}" + (f"/{slicing.blocks}" if slicing.blocks > 1 else "") + "z" * slicing.zigzag


def read_slicing(text: str) -> Slicing | None:
    """Read a divided dimension. None: it is not divided."""
    if text == "-":
        return None
    dim, _, blocks = text.removesuffix("z").partition("/")
    return Slicing(dim=int(dim), blocks=int(blocks or 1), zigzag=text.endswith("z"))


def show_shardings(shardings: Sequence[Sharding]) -> str:
    """Write how a set of devices divides a tensor: `0:2` in two, `1:4*2` in four, two devices apart."""
    return "+".join(
        f"{show_slicing(held)}:{held.ways}" + (f"*{held.stride}" if held.stride > 1 else "")
        for held in shardings
    )


def read_shardings(text: str) -> tuple[Sharding, ...]:
    """Read how a set of devices divides a tensor."""
    found = []
    for part in text.split("+") if text else ():
        slicing, _, degree = part.partition(":")
        ways, _, stride = degree.partition("*")
        held = read_slicing(slicing)
        if held is None:
            raise BadLineError(f"{part!r} divides no dimension")
        found.append(
            Sharding(
                dim=held.dim, blocks=held.blocks, zigzag=held.zigzag, ways=int(ways), stride=int(stride or 1)
            )
        )
    return tuple(found)


def read_sharding(text: str) -> Sharding:
    """Read how a set of devices divides a tensor along one dimension."""
    (held,) = read_shardings(text)
    return held


def show_collective(how: Collective) -> str:
    """Return the text of a collective inside a region."""
    dims = f"{show_slicing(how.joined)}>{show_slicing(how.cut)}"
    return f"{shown(how.axis)} {how.degree} {how.op} {how.back} {dims}"


def read_collective(text: str) -> Collective:
    """Read a collective inside a region."""
    axis, degree, op, back, dims = text.rsplit(" ", 4)
    joined, _, cut = dims.partition(">")
    if op not in get_args(CollectiveOp) or back not in get_args(CollectiveOp):
        raise BadLineError(f"there is no collective {op!r} with {back!r} as its backward")
    return Collective(
        axis=name(axis),
        degree=int(degree),
        op=cast(CollectiveOp, op),
        back=cast(CollectiveOp, back),
        joined=read_slicing(joined),
        cut=read_slicing(cut),
    )
