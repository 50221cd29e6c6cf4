"""The text form of sharded tensors: shards, their axes and the collectives between them."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import cast, get_args

from piper.ir.sharding import Collective, CollectiveOp, Shard, Sharding
from piper.ir.text_fields import BadLineError, name, shown


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
        joined=read_shard(joined),
        cut=read_shard(cut),
    )
