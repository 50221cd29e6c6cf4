"""Buffers of expert regions: where experts are divided over devices, each device holds its experts' slice."""

from dataclasses import dataclass

from piper.plan.plan import Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The slice of a divided tensor that a device holds."""

    part: int
    ways: int
    axis: int = 0


def buffer_shares(plans: Plans, device: int) -> dict[str, Share]:
    """Return the buffers that a device holds, and which share of each."""
    return {
        slot.owner: Share(
            part=held.sharding.index(held.placed.index(device)) if held.placed else 0,
            ways=held.sharding.ways,
            axis=held.sharding.dim,
        )
        for slot, held in plans.of(device).residents.items()
        if slot.kind == "buffer"
    }
