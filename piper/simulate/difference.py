"""Compares two sets of plans: the nodes of both, and those with another device, stream or position."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper.ir.devices import Devices
from piper.plan.plan import Plan, Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a node runs."""

    devices: Devices
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A node of both sets of plans that has other devices or another stream in the second."""

    node: str
    before: Seat
    after: Seat


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A node that a device issues at another position, counted among the nodes it issues in both plans."""

    node: str
    device: int
    before: int  # among the nodes that the device issues in both
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changes from the first plans to the second."""

    gone: tuple[str, ...]
    new: tuple[str, ...]
    moved: tuple[Move, ...]  # to other devices, or another stream
    shifted: tuple[Shift, ...]  # in the order of their device


def difference(first: Plans, second: Plans) -> Difference:
    """Compare plans node by node; nodes are named by what they are, so equal names mean equal work."""
    before, after = seats(first), seats(second)
    return Difference(
        gone=tuple(node for node in before if node not in after),
        new=tuple(node for node in after if node not in before),
        moved=tuple(
            Move(node=node, before=seat, after=after[node])
            for node, seat in before.items()
            if node in after and after[node] != seat
        ),
        shifted=tuple(shifts(first, second)),
    )


def seats(plans: Plans) -> dict[str, Seat]:
    """Return the devices and the stream of every node; for a transfer, its first stream."""
    devices: dict[str, dict[int, None]] = {}
    streams: dict[str, str] = {}
    for plan in plans:
        for node in dict.fromkeys(ins.node for ins in plan.instrs):
            devices.setdefault(node, {}).update(dict.fromkeys(plan.devices))
        for ins in plan.instrs:
            streams.setdefault(ins.node, ins.stream)
    return {node: Seat(devices=tuple(sorted(found)), stream=streams[node]) for node, found in devices.items()}


def shifts(first: Plans, second: Plans) -> Iterable[Shift]:
    """Yield the fewest nodes that must move to make one issue order the other, for a device per program."""
    there = {device: plan for plan in second for device in plan.devices}
    for plan in first:
        device = plan.devices[0]
        if device in there:
            left, right = order(plan), order(there[device])
            common = [node for node in left if node in right]
            place = {node: i for i, node in enumerate(n for n in right if n in left)}
            stay = longest_run([place[node] for node in common])
            for i, node in enumerate(common):
                if i not in stay:
                    yield Shift(node=node, device=device, before=i, after=place[node])


def order(plan: Plan) -> dict[str, None]:
    """Return the nodes of a plan in issue order."""
    return dict.fromkeys(ins.node for ins in plan.instrs)


def longest_run(places: Sequence[int]) -> set[int]:
    """Return the indices of a longest increasing subsequence."""
    ends: list[int] = []  # the smallest last value of an increasing subsequence of each length
    at: list[int] = []  # its index
    before: list[int] = []
    for i, value in enumerate(places):
        length = bisect_left(ends, value)
        before.append(at[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            at.append(i)
        else:
            ends[length], at[length] = value, i
    kept: set[int] = set()
    i = at[-1] if at else -1
    while i >= 0:
        kept.add(i)
        i = before[i]
    return kept
