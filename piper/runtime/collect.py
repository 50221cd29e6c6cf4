"""Collectives inside sharded regions: values joined, cut, summed and exchanged within a group."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from piper.ir.sharding import Collective, Shard
from piper.plan.instr import Instr
from piper.runtime.comm.base import Group
from piper.runtime.context import Bound, Env


def collect(env: Env, ins: Instr) -> Bound:
    """Bring a sharded value into another layout."""
    slots, source, target = env.slots, env.at(ins.reads[0]), env.at(ins.writes[0])
    how = ins.collects.how
    work: Callable[[Tensor], Tensor]
    if how.op == "slice":
        assert how.cut is not None
        place = ins.collects.axis.coordinate(ins.collects.devices.index(env.device))
        work = partial(part, shard=how.cut, degree=how.degree, place=place)
    else:
        work = partial(OPERATIONS[how.op], env.group(ins), how)

    def run() -> None:
        slots[target] = work(cast(Tensor, slots[source]))

    return run


def all_gather(group: Group, how: Collective, value: Tensor) -> Tensor:
    """Join every member's part."""
    assert how.joined is not None
    flat = value.contiguous().view(-1)
    out = flat.new_empty(len(flat) * group.size)
    group.all_gather(flat, out)
    return joined(out.view(group.size, *value.shape), how.joined)


def reduce_scatter(group: Group, how: Collective, value: Tensor) -> Tensor:
    """Sum every member's value, and return this member's part."""
    assert how.cut is not None
    parts = apart(value, how.cut, group.size)
    return group.reduce_scatter(parts.view(-1), parts[0].numel()).view(parts.shape[1:])


def all_reduce(group: Group, how: Collective, value: Tensor) -> Tensor:
    """Sum every member's value."""
    flat = value.contiguous().view(-1)
    total = group.all_reduce(flat)
    return (total.clone() if total is flat else total).view(value.shape)


def maximum(group: Group, how: Collective, value: Tensor) -> Tensor:
    """Take the largest of every member's values, element by element."""
    flat = value.contiguous().view(-1)
    given = group.swap([flat] * group.size, [len(flat)] * group.size)
    return torch.stack(list(given)).amax(0).view(value.shape)


def all_to_all(group: Group, how: Collective, value: Tensor) -> Tensor:
    """Shard a value along another dimension."""
    assert how.joined is not None and how.cut is not None
    parts = apart(value, how.cut, group.size)
    given = group.swap(list(parts.view(group.size, -1)), [parts[0].numel()] * group.size)
    return joined(torch.stack([part.view(parts.shape[1:]) for part in given]), how.joined)


def shift(by: int, group: Group, how: Collective, value: Tensor) -> Tensor:
    """Give a value to the member `by` places on."""
    return group.shift(value.contiguous().view(-1), by).view(value.shape)


OPERATIONS: dict[str, Callable[[Group, Collective, Tensor], Tensor]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "max": maximum,
    "all_to_all": all_to_all,
    "shift": partial(shift, 1),
    "shift_back": partial(shift, -1),
}


def apart(value: Tensor, shard: Shard, degree: int) -> Tensor:
    """Return every member's part of a value, one after another in memory: [degree, *part]."""
    # This copies at most once, and not at all where the parts lie so in memory already.
    dim = shard.dim
    pieces = _pieces(value, shard, degree)
    return pieces.movedim(dim + 1, 0).flatten(dim + 1, dim + 2 + shard.zigzag).contiguous()


def part(value: Tensor, shard: Shard, degree: int, place: int) -> Tensor:
    """Return one member's part of a value, in memory of its own."""
    dim = shard.dim
    mine = _pieces(value, shard, degree).select(dim + 1, place)
    return mine.flatten(dim, dim + 1 + shard.zigzag).clone(memory_format=torch.contiguous_format)


def _pieces(value: Tensor, shard: Shard, degree: int) -> Tensor:
    """Return a view or copy whose dimensions `dim` and `dim + 1` are the blocks and the members."""
    # The next dimension holds a member's elements of a block; under zigzag its two slices come before them.
    dim = shard.dim
    if not shard.zigzag:
        pieces: Tensor = value.unflatten(dim, (shard.blocks, degree, -1))
        return pieces
    slices = value.unflatten(dim, (shard.blocks, 2 * degree, -1))
    early, late = slices.narrow(dim + 1, 0, degree), slices.narrow(dim + 1, degree, degree).flip(dim + 1)
    return torch.stack([early, late], dim + 2)


def joined(parts: Tensor, shard: Shard) -> Tensor:
    """Return the value of which each member has a part, from [degree, *part]."""
    # This copies at most once, and not at all where nothing lies before the sharded dimension.
    dim = shard.dim
    if not shard.zigzag:
        apart: Tensor = parts.unflatten(dim + 1, (shard.blocks, -1)).movedim(0, dim + 1)
        return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 3 :]).contiguous()
    halves = parts.unflatten(dim + 1, (shard.blocks, 2, -1)).movedim(0, dim + 1)
    early, late = halves.select(dim + 2, 0), halves.select(dim + 2, 1).flip(dim + 1)
    return torch.cat([early, late], dim + 1).flatten(dim, dim + 2)
