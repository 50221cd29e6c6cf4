"""Which devices run one program, and how transfers pair them up."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from piper.ir.devices import Devices, show


def classes_of(sets: Iterable[Devices]) -> list[Devices]:
    """Return the coarsest groups such that every set is a union of groups, ordered by first device."""
    membership: dict[int, list[int]] = {}
    for number, devices in enumerate(sets):
        for device in devices:
            membership.setdefault(device, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(membership):
        groups.setdefault(tuple(membership[device]), []).append(device)
    return [tuple(devices) for devices in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPairs:
    """Pairs of devices that a transfer joins in the same way, and which rows of the sender's value travel."""

    name: str
    senders: Devices
    receivers: Devices  # the i-th receives from the i-th sender
    rows: tuple[int, int, int]  # from, to, out of: [1, 2) of 2 is the second half
    piece: tuple[int, int]  # which of the receiver's pieces this is, and of how many
    local: bool = False  # sender and receiver are one device: nothing travels


@lru_cache(maxsize=4096)
def channels(
    source: Devices, target: Devices, stream: str, sliced: bool, degrees: tuple[int, int] = (1, 1)
) -> tuple[TransferPairs, ...]:
    """Return the channels by which a value travels from one set of devices to another.

    Each device holds an equal slice of the samples.

    The samples are cut into as many cells as both sets divide; a device holds neighbouring cells. A value
    that is the same for all samples comes to each receiver whole, from one sender. Where neighbours share
    their samples, the i-th of them sends to the i-th; else all hold the same value, and the first sends it.
    """
    pairs_by_channel: dict[
        tuple[tuple[int, int, int], tuple[int, int], bool, int], list[tuple[int, int]]
    ] = {}
    served: dict[tuple[object, ...], int] = {}
    left, right = degrees
    for neighbour in range(right):
        givers, takers = source[neighbour if left == right else 0 :: left], target[neighbour::right]
        n, m = len(givers), len(takers)
        cells = lcm(n, m)
        for j, receiver in enumerate(takers):
            low, high = j * cells // m, (j + 1) * cells // m
            senders = range(low * n // cells, (high - 1) * n // cells + 1)
            for place, i in enumerate(senders if sliced else senders[:1]):
                first, last = i * cells // n, (i + 1) * cells // n
                rows = (max(low, first) - first, min(high, last) - first, last - first)
                if not sliced or rows == (0, last - first, last - first):
                    rows = (0, 1, 1)
                sender = givers[i]
                channel = (rows, (place, len(senders) if sliced else 1), sender == receiver)
                nth = served[channel, sender] = served.get((channel, sender), -1) + 1  # once in a channel
                pairs_by_channel.setdefault((*channel, nth), []).append((sender, receiver))
    label = f"{show(source)}{'>' if sliced else '>>'}{show(target)}" + (f":{stream}" if stream else "")
    if degrees != (1, 1):
        label += f"/{left}:{right}"
    return tuple(
        TransferPairs(
            name=f"{label}/{number}" if len(pairs_by_channel) > 1 else label,
            senders=tuple(sender for sender, _ in pairs),
            receivers=tuple(receiver for _, receiver in pairs),
            rows=rows,
            piece=piece,
            local=local,
        )
        for number, ((rows, piece, local, _), pairs) in enumerate(pairs_by_channel.items())
    )
