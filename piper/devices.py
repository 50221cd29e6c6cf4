"""Sets of devices, how they are written down, and how tensors are divided among them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

Devices = tuple[int, ...]  # logical indices; the i-th takes the i-th slice of the samples
RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Divides a tensor into `ways` equal parts along a dimension; device i of a set holds part i mod ways."""

    axis: int = 0
    ways: int = 1

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one part."""
        if self.ways == 1:
            return shape
        return (*shape[: self.axis], shape[self.axis] // self.ways, *shape[self.axis + 1 :])

    def part(self, devices: Devices, device: int) -> int:
        """Return which part a device of a set holds."""
        return devices.index(device) % self.ways if self.ways > 1 else 0

    def runs(self, shape: tuple[int, ...], part: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield where elements `low` to `high` of a part lie in the whole, both flattened.

        shape: of the part. Each run is its start in the whole, its start in the part, and its length.
        """
        inner = prod(shape[self.axis :]) if self.ways > 1 else prod(shape)
        while low < high:
            outer, within = divmod(low, inner)
            length = min(high - low, inner - within)
            yield (outer * self.ways + part) * inner + within, low, length
            low += length


WHOLE = Sharding()


@lru_cache(maxsize=4096)
def show(devices: Devices) -> str:
    """Write a set of devices shortly: `0`, `0,2`, `0-7`, `0-14/2`."""
    if len(devices) > 2:
        step = devices[1] - devices[0]
        if step > 0 and devices == tuple(range(devices[0], devices[-1] + 1, step)):
            return f"{devices[0]}-{devices[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, devices))


@lru_cache(maxsize=4096)
def parse(text: str) -> Devices:
    """Read what `show` wrote."""
    if match := RANGE.fullmatch(text):
        first, last, step = match.groups()
        return tuple(range(int(first), int(last) + 1, int(step or 1)))
    return tuple(int(number) for number in text.split(",")) if text else ()


def groups_of(devices: Devices, ways: int) -> tuple[Devices, ...]:
    """Cut a set into neighbouring groups of `ways`: the groups that divide experts among them."""
    return tuple(devices[i : i + ways] for i in range(0, len(devices), ways))


def columns(rows: Sequence[Devices]) -> tuple[Devices, ...]:
    """The i-th device of every set together: the copies of one part in sets of equal size."""
    return tuple(zip(*rows, strict=True))
