"""The table from op to kernel: each binds an instruction once, so that a step only calls."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from piper.plan.instr import Instr
from piper.plan.ops import Op, Routing, Rows
from piper.runtime import gradients
from piper.runtime.collect import collect
from piper.runtime.comm.base import Form
from piper.runtime.compute import compute, load
from piper.runtime.context import Bound, Env
from piper.runtime.expert_exchange import Blocks, Splits, count, count_blocks, count_divided, refuse_counts
from piper.runtime.group_means import average, merge
from piper.runtime.host_copies import fetch, mirror, offload, protect


def send(env: Env, ins: Instr) -> Bound:
    """Hand a value, or some of its rows, to another device."""
    assert ins.comm is not None
    pipe, slots, source = env.comms.outgoing(ins.comm), env.slots, env.at(ins.reads[0])
    cut, form = row_cut(ins), Form()

    def run() -> None:
        pipe.send(cut(cast(Tensor, slots[source])), form)

    return run


def recv(env: Env, ins: Instr) -> Bound:
    """Take a value from another device."""
    assert ins.comm is not None
    pipe, slots, target = env.comms.incoming(ins.comm), env.slots, env.at(ins.writes[0])
    assert not env.plan.slots[ins.writes[0]].dynamic, "rows between route and unroute stay on their devices"
    form = Form()

    def run() -> None:
        slots[target] = pipe.recv(form)

    return run


def copy(env: Env, ins: Instr) -> Bound:
    """Copy a value, or some of its rows, to another slot of the same device."""
    slots, source, target = env.slots, env.at(ins.reads[0]), env.at(ins.writes[0])
    cut = row_cut(ins)

    def run() -> None:
        value = cast(Tensor, slots[source])
        part = cut(value)
        slots[target] = part.clone() if part is value else part

    return run


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
    slots, sources, target = env.slots, [env.at(slot) for slot in ins.reads], env.at(ins.writes[0])

    def run() -> None:
        slots[target] = torch.cat([cast(Tensor, slots[source]) for source in sources])

    return run


def add(env: Env, ins: Instr) -> Bound:
    """Sum two gradients of one value."""
    slots, (left, right), target = env.slots, map(env.at, ins.reads), env.at(ins.writes[0])

    def run() -> None:
        slots[target] = cast(Tensor, slots[left]) + cast(Tensor, slots[right])

    return run


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
    group, slots = env.group(ins), env.slots
    (rows, splits), target = map(env.at, ins.reads), env.at(ins.writes[0])
    assert isinstance(ins.payload, Routing)
    outward, backward = ins.payload.outward, ins.payload.run.phase != "F"

    def run() -> None:
        value, how = cast(Tensor, slots[rows]), cast("Splits | Blocks", slots[splits])
        slots[target] = how.outward(group, value, gradients=backward) if outward else how.back(group, value)

    return run


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
