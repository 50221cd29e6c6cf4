"""The table from op to kernel: each binds an instruction once, so that a step only calls."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from piper.ir.sharding import Collective, Shard
from piper.plan.instr import Instr
from piper.plan.ops import Op, Routing, Rows
from piper.runtime import gradients
from piper.runtime.comm.base import Group
from piper.runtime.compute import compute, load
from piper.runtime.context import Bound, Env, writing
from piper.runtime.expert_exchange import Blocks, Splits, count, count_blocks, count_divided, refuse_counts
from piper.runtime.group_means import average, merge
from piper.runtime.host_copies import fetch, mirror, offload, protect


def send(env: Env, ins: Instr) -> Bound:
    """Hand a value, or some of its rows, to another device."""
    assert ins.comm is not None
    pipe, slots, source = env.comms.outgoing(ins.comm), env.slots, env.at(ins.reads[0])
    cut, form = row_cut(ins), env.sent_by(env.device)[ins.node, ins.comm]

    def run() -> None:
        value = cut(cast(Tensor, slots[source]))
        assert (value.shape, value.dtype) == form, (
            f"{ins.node} sends another shape or type than its receiver takes"
        )
        pipe.send(value)

    return run


def recv(env: Env, ins: Instr) -> Bound:
    """Take a value from another device."""
    assert ins.comm is not None
    pipe, slots, target = env.comms.incoming(ins.comm), env.slots, env.at(ins.writes[0])
    form = env.arriving(ins)

    def run() -> None:
        slots[target] = pipe.recv(form)

    return run


def copy(env: Env, ins: Instr) -> Bound:
    """Copy a value, or some of its rows, to another slot of the same device."""
    cut = row_cut(ins)
    return writing(env, ins, lambda value: rows.clone() if (rows := cut(value)) is value else rows)


def row_cut(ins: Instr) -> Callable[[Tensor], Tensor]:
    """Take the rows that an instruction names, or all of them."""
    if not isinstance(ins.payload, Rows):
        return lambda value: value
    start, stop, of = ins.payload.start, ins.payload.stop, ins.payload.of

    def cut(value: Tensor) -> Tensor:
        rows = len(value)
        return value[rows * start // of : rows * stop // of].clone()

    return cut


def concat(env: Env, ins: Instr) -> Bound:
    """Join the pieces of a value along the samples."""
    return writing(env, ins, lambda *pieces: torch.cat(pieces))


def add(env: Env, ins: Instr) -> Bound:
    """Sum two gradients of one value."""
    return writing(env, ins, torch.add)


def counts(env: Env, ins: Instr) -> Bound:
    """Agree within an expert group on how many rows travel."""
    group, slots = env.group(ins), env.slots
    source, (splits, local, *overflows) = env.at(ins.reads[0]), map(env.at, ins.writes)
    assert isinstance(ins.payload, Routing)
    region = env.clones_behind(ins.payload.run.chunk)
    rows, block = ins.payload.rows, ins.payload.block

    def run() -> None:
        slots[splits], slots[local] = count(group, cast(Tensor, slots[source]))

    def run_divided() -> None:
        division = env.division(region)
        slots[splits], slots[local], rows = count_divided(group, cast(Tensor, slots[source]), division)
        env.rows[region] = env.rows[region] + rows if region in env.rows else rows

    def run_in_blocks() -> None:
        if env.exact:
            run()
            sent = cast(Tensor, slots[source]).view(group.size, -1).sum(1)
            env.fullest.append((block * group.size / rows, sent.max() * (group.size / rows)))
            flag = torch.zeros((), dtype=torch.bool, device=env.setup.device)
        else:
            slots[splits], slots[local], flag = count_blocks(group, cast(Tensor, slots[source]), rows, block)
            if not overflows:
                refuse_counts(flag)
        for slot in overflows:
            slots[slot] = flag

    return run_in_blocks if block else run_divided if region else run


def exchange(env: Env, ins: Instr) -> Bound:
    """Send rows to their experts, or back."""
    group = env.group(ins)
    assert isinstance(ins.payload, Routing)
    outward, backward = ins.payload.outward, ins.payload.run.phase != "F"

    def moved(rows: Tensor, how: Splits | Blocks) -> Tensor:
        return how.outward(group, rows, gradients=backward) if outward else how.back(group, rows)

    return writing(env, ins, moved)


def collect(env: Env, ins: Instr) -> Bound:
    """Bring a sharded value into another layout."""
    how = ins.collects.how
    if how.op != "slice":
        return writing(env, ins, partial(OPERATIONS[how.op], env.group(ins), how))
    assert how.cut is not None
    place = ins.collects.axis.coordinate(ins.collects.devices.index(env.device))
    return writing(env, ins, partial(part, shard=how.cut, degree=how.degree, place=place))


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


KERNELS: Mapping[Op, Callable[[Env, Instr], Bound]] = {
    "load": load,
    "compute": compute,
    "send": send,
    "recv": recv,
    "copy": copy,
    "concat": concat,
    "add": add,
    "counts": counts,
    "exchange": exchange,
    "collect": collect,
    "shift": collect,
    "slice": collect,
    "gather": gradients.gather,
    "accumulate": gradients.accumulate,
    "all_reduce": gradients.all_reduce,
    "reduce_scatter": gradients.reduce_scatter,
    "reshard": gradients.reshard,
    "norm": gradients.norm,
    "total": gradients.total,
    "update": gradients.update,
    "average": average,
    "merge": merge,
    "broadcast": gradients.broadcast,
    "protect": protect,
    "mirror": mirror,
    "offload": offload,
    "fetch": fetch,
}
