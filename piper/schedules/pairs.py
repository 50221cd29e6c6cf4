"""Pairs of microbatches that run against each other on the same devices, without a pipeline."""

from piper.directives.order import Order, order
from piper.errors import ScheduleError
from piper.ir.select import At, at
from piper.schedules.grid import need_whole


def pairs(microbatches: int, *, part: str = "MB") -> list[Order]:
    """Run two microbatches at a time: both forwards, then both backwards. The last of an odd number is alone.

    The two members of a group may interleave, so the collectives of one microbatch hide behind the compute of
    the other. The activations of two microbatches are alive at once.

    F0+F1 B0+B1 F2+F3 B2+B3
    """
    need_whole("pairs", microbatches=microbatches)
    if part == "PASS":
        raise ScheduleError(
            "part='PASS' is not an axis", by="pairs", hint='name the axis of a split: part="MB"'
        )

    def select(number: int, phase: str) -> At:
        return at(PASS=phase, **{part: number})

    groups: list[list[At]] = []
    for first in range(0, microbatches, 2):
        numbers = range(first, min(first + 2, microbatches))
        groups += [[select(number, phase) for number in numbers] for phase in ("F", "B")]
    return [order(groups)]
