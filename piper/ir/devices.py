"""Sets of devices, and how they are written down."""

import re
from collections.abc import Sequence
from functools import lru_cache

Devices = tuple[int, ...]  # logical indices; the i-th takes the i-th slice of the samples
RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")


class InternedDevices(tuple[int, ...]):
    """A set of devices that knows its hash: with thousands of devices, hashing is most of a look-up."""

    _known: int

    def __hash__(self) -> int:
        return self._known

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return tuple, (tuple(self),)


@lru_cache(maxsize=4096)
def interned(devices: Devices) -> Devices:
    """Return equal sets of devices as one object, so that comparing and looking them up takes no time."""
    kept = InternedDevices(devices)
    kept._known = hash(devices)
    return kept


@lru_cache(maxsize=4096)
def show(devices: Devices) -> str:
    """Return a short text for a set of devices: `0`, `0,2`, `0-7`, `0-14/2`."""
    if len(devices) > 2:
        step = devices[1] - devices[0]
        if step > 0 and devices == tuple(range(devices[0], devices[-1] + 1, step)):
            return f"{devices[0]}-{devices[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, devices))


def in_words(devices: Devices) -> str:
    """Return a set of devices in words: `device 0`, `devices 0-3`."""
    return f"device{'s' if len(devices) > 1 else ''} {show(devices)}"


@lru_cache(maxsize=4096)
def parse(text: str) -> Devices:
    """Read a set of devices from the text that `show` returns."""
    if match := RANGE.fullmatch(text):
        first, last, step = match.groups()
        return tuple(range(int(first), int(last) + 1, int(step or 1)))
    return tuple(int(number) for number in text.split(",")) if text else ()


def columns(rows: Sequence[Devices]) -> tuple[Devices, ...]:
    """Return, for each i, the i-th device of every set: the copies of one part in sets of equal size."""
    return tuple(zip(*rows, strict=True))
