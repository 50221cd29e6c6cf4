"""The rows of a global batch that one device needs, under the numbers they have in the whole."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.plan.plan import Plans
from piper.runtime.compute import slices

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    """Some rows of a field."""

    samples: int  # of the whole field
    dtype: torch.dtype
    parts: tuple[tuple[int, Tensor], ...]  # where each run of rows begins, and the rows

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, rows: slice) -> Tensor:
        for first, part in self.parts:
            if first <= rows.start and rows.stop <= first + len(part):
                return part[rows.start - first : rows.stop - first]
        raise IndexError(f"rows {rows.start}:{rows.stop} were not sent to this device")


def spans_of(plans: Plans, device: int, samples: int) -> dict[str, list[Span]]:
    """The rows that a device's plan loads, field by field, in runs that do not touch."""
    found: dict[str, list[Span]] = {}
    for ins in plans.of(device).instrs:
        if ins.op == "load":
            place, count = ins.devices.index(device), len(ins.devices)
            found.setdefault(ins.arg, []).extend(slices(plans, samples, place, count, ins.part))
    return {field: joined(spans) for field, spans in found.items()}


def joined(spans: list[Span]) -> list[Span]:
    """Spans in order, those that touch or overlap made one."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


class BatchSlicer:
    """Cuts batches into what each device needs; the rows are worked out once for each length of batch."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.known: dict[tuple[int, int], dict[str, list[Span]]] = {}

    def cut(self, batch: Mapping[str, Tensor], device: int) -> dict[str, BatchSlice]:
        """What one device needs of a batch."""
        samples = len(next(iter(batch.values())))
        if (device, samples) not in self.known:
            self.known[device, samples] = spans_of(self.plans, device, samples)
        return {
            field: BatchSlice(
                samples=samples,
                dtype=batch[field].dtype,
                parts=tuple((low, batch[field][low:high]) for low, high in spans),
            )
            for field, spans in self.known[device, samples].items()
        }
