"""Buffers of expert regions: where experts are divided over devices, each holds its experts' part."""

from collections.abc import Mapping
from dataclasses import dataclass

from piper.ids import SlotId
from piper.plan.plan import Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a device holds of a tensor whose first axis is divided."""

    part: int
    ways: int


def share_of(plans: Plans, slot: SlotId, whole: int, device: int) -> Share:
    """A device's share of what a slot holds, given the bytes of all of it."""
    held = plans.of(device).residents[slot].nbytes
    ways = whole // held if held else 1
    if ways == 1:
        return Share(part=0, ways=1)
    reader = next(
        ins.computes.chunk for ins in plans.of(device).instrs if ins.op == "compute" and slot in ins.reads
    )
    home = sorted(
        member
        for plan in plans
        if any(ins.op == "compute" and ins.computes.chunk == reader for ins in plan.instrs)
        for member in plan.devices
    )
    return Share(part=home.index(device) % ways, ways=ways)


def buffer_shares(plans: Plans, sizes: Mapping[str, int], device: int) -> dict[str, Share]:
    """The buffers that a device holds, and which share of each, given the bytes of all buffers."""
    held = [slot for slot in plans.of(device).residents if slot.kind == "buffer"]
    return {slot.owner: share_of(plans, slot, sizes[slot.owner], device) for slot in held}
