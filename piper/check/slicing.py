"""The samples that a device sees at a time, by the documented rule alone.

`docs/architecture-compile.md` has the rule (Samples).
The reference of `piper check` uses this module. The workers slice a batch with code of their own
(`runtime/compute.py`), so a wrong slicing on either side shows as a difference.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from piper.ir.chunk import CapturedModel, Tags
from piper.ir.devices import Devices
from piper.plan.plan import Plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The samples that one device sees at a time, by their numbers in the global batch."""

    replica: int
    part: Tags
    samples: tuple[int, ...]

    def rows(self, each: int) -> list[int]:
        """Return the rows of its samples, where every sample has `each` rows."""
        return [sample * each + i for sample in self.samples for i in range(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlicing:
    """How the plans cut a global batch."""

    # The devices of each chunk's forward, by microbatch: of a group that shares its samples, the first. Where
    # microbatches run on different devices, they do on as many.
    placed: Mapping[str, Mapping[Tags, Devices]]
    cells: int  # the least number of cells that every set of devices divides
    counts: Mapping[str, int]  # how many microbatches there are along each axis

    def slices(self, chunk: str, samples: int) -> Iterator[Slice]:
        """Yield the slices of a chunk's samples, replica by replica."""
        replicas = len(next(iter(self.placed[chunk].values())))
        for replica in range(replicas):
            for part in self.placed[chunk]:
                rows = self._rows(replicas, samples, replica, part)
                yield Slice(replica=replica, part=part, samples=tuple(rows))

    def _rows(self, replicas: int, samples: int, replica: int, part: Tags) -> Iterator[int]:
        """Yield the samples of part k of p: the k-th of p equal pieces of each cell of the device."""
        size = samples // self.cells
        pieces, number = 1, 0
        for axis, index in part:  # the first axis is the slowest
            pieces, number = pieces * self.counts[axis], number * self.counts[axis] + index
        piece = size // pieces
        per_device = self.cells // replicas
        for cell in range(replica * per_device, (replica + 1) * per_device):
            first = cell * size + number * piece
            yield from range(first, first + piece)


def slicing_of(plans: Plans, outline: CapturedModel | None = None) -> BatchSlicing:
    """Read from the plans where each forward runs; the outline says how many devices share samples."""
    degrees = {} if outline is None else {chunk.name: outline.degree(chunk) for chunk in outline.chunks}
    devices: dict[str, dict[Tags, set[int]]] = {}
    counts: dict[str, int] = {}
    for plan in plans:
        for ins in plan.instrs:
            if ins.op == "compute" and ins.computes.phase == "F":
                chunk, part = ins.computes.chunk, ins.computes.part
                devices.setdefault(chunk, {}).setdefault(part, set()).update(plan.devices)
                for axis, index in part:
                    counts[axis] = max(counts.get(axis, 0), index + 1)
    placed: dict[str, dict[Tags, Devices]] = {}
    for chunk, parts in devices.items():
        for part in sorted(parts):
            running = [one for one in plans.chunks[chunk].devices_for(part) if one in parts[part]]
            placed.setdefault(chunk, {})[part] = tuple(running[:: degrees.get(chunk, 1)])
    cells = math.lcm(*(len(each) for parts in placed.values() for each in parts.values()))
    return BatchSlicing(placed=placed, cells=cells, counts=counts)


def take(batch: Mapping[str, Tensor], samples: tuple[int, ...]) -> dict[str, Tensor]:
    """Return some samples of a batch."""
    return {name: value[[*samples]] for name, value in batch.items()}
