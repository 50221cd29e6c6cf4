"""Which devices run one program, and how transfers pair them up."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from piper.ir.devices import Devices, show


def classes_of(sets: Iterable[Devices]) -> list[Devices]:
    """The coarsest groups of devices such that every set is a union of groups, in the order of their first device."""
    membership: dict[int, list[int]] = {}
    for number, devices in enumerate(sets):
        for device in devices:
            membership.setdefault(device, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(membership):
        groups.setdefault(tuple(membership[device]), []).append(device)
    return [tuple(devices) for devices in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Pairs of devices that a transfer joins in the same way, and which rows of the sender's value travel."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    rows: tuple[int, int, int]  # from, to, out of: [1, 2) of 2 is the second half
    piece: tuple[int, int]  # which of the receiver's pieces this is, and of how many
    local: bool = False  # sender and receiver are one device: nothing travels

    @property
    def senders(self) -> Devices:
        return tuple(sender for sender, _ in self.pairs)

    @property
    def receivers(self) -> Devices:
        return tuple(receiver for _, receiver in self.pairs)


@lru_cache(maxsize=4096)
def channels(source: Devices, target: Devices, stream: str, sliced: bool) -> tuple[Channel, ...]:
    """How a value travels from one set of devices to another, each holding an equal slice of the samples.

    The samples are cut into as many cells as both sets divide; a device holds neighbouring cells.
    """
    n, m = len(source), len(target)
    cells = n * m // gcd(n, m)
    found: dict[tuple[tuple[int, int, int], tuple[int, int], bool, int], list[tuple[int, int]]] = {}
    served: dict[tuple[object, ...], int] = {}
    for j, receiver in enumerate(target):
        low, high = j * cells // m, (j + 1) * cells // m
        senders = range(low * n // cells, (high - 1) * n // cells + 1)
        if not sliced:
            senders = range(senders[0], senders[0] + 1)
        for piece, i in enumerate(senders):
            mine = (i * cells // n, (i + 1) * cells // n)
            width = mine[1] - mine[0]
            start, stop = max(low, mine[0]) - mine[0], min(high, mine[1]) - mine[0]
            rows = (start, stop, width) if sliced and (start, stop) != (0, width) else (0, 1, 1)
            alike = (rows, (piece, len(senders)), source[i] == receiver)
            nth = served[alike, i] = served.get((alike, i), -1) + 1  # a sender stands once in a channel
            found.setdefault((*alike, nth), []).append((source[i], receiver))
    label = f"{show(source)}>{show(target)}" + (f":{stream}" if stream else "")
    made = []
    for number, ((rows, piece, local, _), pairs) in enumerate(found.items()):
        name = f"{label}/{number}" if len(found) > 1 else label
        made.append(Channel(name=name, pairs=tuple(pairs), rows=rows, piece=piece, local=local))
    return tuple(made)
