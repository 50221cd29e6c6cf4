"""Finds the first collective inside a sharded region whose result is wrong.

Each result is worked out a second time here, from the values that the members of its group gave and from what
the captured model says the collective is. No code is shared with `runtime/collect.py`, which workers run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor

from piper.check.distance import distance
from piper.ir.chunk import CapturedModel
from piper.ir.devices import Devices
from piper.ir.ids import Pass
from piper.ir.mesh import groups_along
from piper.ir.sharding import Collective, Shard
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.runtime.debug.output_recorder import OutputKey

Trails = Mapping[int, Mapping[OutputKey, Tensor]]  # the values that each device kept


def first_bad_collective(outline: CapturedModel, plans: Plans, trails: Trails, tol: float) -> str | None:
    """Name the first collective, in the order of the model, whose result differs. None: all are right."""
    chunks = {chunk.name: chunk.collective for chunk in outline.chunks}
    order = {chunk.name: place for place, chunk in enumerate(outline.chunks)}
    ordered = [
        ((run.phase != "F", order[run.chunk] * (1 if run.phase == "F" else -1), run.part), ins, group)
        for ins, run, group in collectives(plans)
    ]
    for _, ins, group in sorted(ordered, key=lambda one: one[0]):
        run = ins.collects.run
        how = chunks[run.chunk]
        assert how is not None, f"{run.chunk} is no collective"
        how = how if run.phase == "F" else how.adjoint
        given = [trails[device].get((run, ins.reads[0].base)) for device in group]
        results = [trails[device].get((run, ins.writes[0].base)) for device in group]
        values = [value for value in given if value is not None]
        if len(values) < len(group):
            continue
        for device, got, wanted in zip(group, results, by_hand(how, values), strict=True):
            if got is None or not wanted.numel():
                continue
            diff = distance(got, wanted) if got.shape == wanted.shape else float("inf")
            if not diff <= tol:
                return (
                    f"{run} on device {device}: the {how.op.replace('_', '-')} along {how.axis} differs by "
                    f"{diff:.3g} from the values that devices {', '.join(map(str, group))} gave"
                )
    return None


def collectives(plans: Plans) -> Iterator[tuple[Instr, Pass, Devices]]:
    """Yield every collective of the plans, once for each group that it runs on."""
    for plan in plans:
        here = set(plan.devices)
        for ins in plan.instrs:
            if ins.op not in ("collect", "slice"):
                continue
            about = ins.collects
            if ins.comm is not None:
                groups = plans.comms[ins.comm].groups
            else:
                groups = groups_along(about.devices, (about.axis,))
            for group in groups:
                if group[0] in here:
                    yield ins, about.run, group


def by_hand(how: Collective, given: Sequence[Tensor]) -> list[Tensor]:
    """Return what each member of a group gets, from the values that all of them gave."""
    n = len(given)
    total = torch.stack([*given]).sum(0) if how.op in ("all_reduce", "reduce_scatter") else given[0]
    match how.op:
        case "none":
            return [*given]
        case "all_reduce":
            return [total] * n
        case "max":
            return [torch.stack([*given]).amax(0)] * n
        case "shift":
            return [given[index - 1] for index in range(n)]
        case "shift_back":
            return [given[(index + 1) % n] for index in range(n)]
        case "all_gather":
            assert how.joined is not None
            return [whole_of(given, how.joined)] * n
        case "reduce_scatter":
            assert how.cut is not None
            return [part_of(total, how.cut, n, i) for i in range(n)]
        case "slice":
            assert how.cut is not None
            return [part_of(value, how.cut, n, i) for i, value in enumerate(given)]
        case "all_to_all":
            assert how.joined is not None and how.cut is not None
            whole = whole_of(given, how.joined)
            return [part_of(whole, how.cut, n, i) for i in range(n)]
        case _:
            assert_never(how.op)


def places_of(size: int, shard: Shard, degree: int, index: int) -> list[int]:
    """Return which elements of a dimension a member holds, in its own order."""
    block = size // shard.blocks
    piece = block // (2 * degree if shard.zigzag else degree)
    pieces = [index, 2 * degree - 1 - index] if shard.zigzag else [index]
    return [
        start * block + number * piece + i
        for start in range(shard.blocks)
        for number in pieces
        for i in range(piece)
    ]


def part_of(value: Tensor, shard: Shard, degree: int, index: int) -> Tensor:
    """Return a member's part of a value."""
    places = places_of(value.shape[shard.dim], shard, degree, index)
    return value.index_select(shard.dim, torch.tensor(places, device=value.device))


def whole_of(parts: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return the value of which each member has a part."""
    degree, dim = len(parts), shard.dim
    shape = list(parts[0].shape)
    shape[dim] *= degree
    whole = parts[0].new_empty(shape)
    for index, part in enumerate(parts):
        places = places_of(shape[dim], shard, degree, index)
        whole.index_copy_(dim, torch.tensor(places, device=whole.device), part)
    return whole
