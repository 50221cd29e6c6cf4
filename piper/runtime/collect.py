"""Collectives inside divided regions: values joined, cut, summed and exchanged within a group."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from piper.plan.instr import Instr
from piper.runtime.comm.base import Group
from piper.runtime.context import Bound, Env
from piper.sharding import Collective, Slicing


def collect(env: Env, ins: Instr) -> Bound:
    """Bring a divided value into another layout."""
    slots, source, target = env.slots, env.at(ins.reads[0]), env.at(ins.writes[0])
    how, devices, stride = ins.collects.how, ins.collects.devices, ins.collects.stride
    if how.op == "slice":
        assert how.cut is not None
        slicing, place = how.cut, devices.index(env.device) // stride % how.degree
        work: Callable[[Tensor], Tensor] = lambda value: cut(value, slicing, how.degree)[place]  # noqa: E731
    else:
        assert ins.comm is not None
        group = env.comms.group(ins.comm)
        work = OPERATIONS[how.op](group, how)

    def run() -> None:
        slots[target] = work(cast(Tensor, slots[source]))

    return run


def all_gather(group: Group, how: Collective) -> Callable[[Tensor], Tensor]:
    """Return a function that joins every member's part."""
    slicing = how.joined
    assert slicing is not None

    def work(value: Tensor) -> Tensor:
        flat = value.contiguous().view(-1)
        out = flat.new_empty(len(flat) * group.size)
        group.all_gather(flat, out)
        return join(out.view(group.size, *value.shape).unbind(), slicing)

    return work


def reduce_scatter(group: Group, how: Collective) -> Callable[[Tensor], Tensor]:
    """Return a function that sums every member's value and keeps this member's part."""
    slicing = how.cut
    assert slicing is not None

    def work(value: Tensor) -> Tensor:
        parts = cut(value, slicing, group.size)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return group.reduce_scatter(flat, parts[0].numel()).view(parts[0].shape)

    return work


def all_reduce(group: Group, how: Collective) -> Callable[[Tensor], Tensor]:
    """Return what sums every member's value."""

    def work(value: Tensor) -> Tensor:
        flat = value.contiguous().view(-1)
        total = group.all_reduce(flat)
        return (total.clone() if total is flat else total).view(value.shape)

    return work


def maximum(group: Group, how: Collective) -> Callable[[Tensor], Tensor]:
    """Return what takes the largest of every member's values, element by element."""

    def work(value: Tensor) -> Tensor:
        flat = value.contiguous().view(-1)
        given = group.swap([flat] * group.size, [len(flat)] * group.size)
        return torch.stack(list(given)).amax(0).view(value.shape)

    return work


def all_to_all(group: Group, how: Collective) -> Callable[[Tensor], Tensor]:
    """Return what divides a value along another dimension."""
    joined, divided = how.joined, how.cut
    assert joined is not None and divided is not None

    def work(value: Tensor) -> Tensor:
        parts = cut(value, divided, group.size)
        length = parts[0].numel()
        given = group.swap([part.reshape(-1) for part in parts], [length] * group.size)
        return join([part.view(parts[0].shape) for part in given], joined)

    return work


OPERATIONS: dict[str, Callable[[Group, Collective], Callable[[Tensor], Tensor]]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "max": maximum,
    "all_to_all": all_to_all,
}


def cut(value: Tensor, slicing: Slicing, ways: int) -> list[Tensor]:
    """Return every member's part of a value, each in memory of its own."""
    dim = slicing.dim
    apart = value.unflatten(dim, (slicing.blocks, -1)) if slicing.blocks > 1 else value.unsqueeze(dim)
    if slicing.zigzag:
        pieces = apart.chunk(2 * ways, dim + 1)
        parts = [torch.cat([pieces[i], pieces[2 * ways - 1 - i]], dim + 1) for i in range(ways)]
    else:
        parts = list(apart.chunk(ways, dim + 1))
    return [part.flatten(dim, dim + 1).contiguous() for part in parts]


def join(parts: Sequence[Tensor], slicing: Slicing) -> Tensor:
    """Return the value of which each member has a part."""
    dim = slicing.dim
    apart = [
        p.unflatten(dim, (slicing.blocks, -1)) if slicing.blocks > 1 else p.unsqueeze(dim) for p in parts
    ]
    if slicing.zigzag:
        halves = [part.chunk(2, dim + 1) for part in apart]
        apart = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 1)
