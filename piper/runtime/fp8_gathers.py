"""Gathers parameters in fp8: half the bytes of bf16.

Each row of a weight is rounded to e4m3 by a scale of its own, as products in fp8 round it
(docs/directives/precision.md). Those products round what arrives once more, to the very same numbers.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piper.plan.bucket import RowRun, ShardCollective, rows_of_shards, runs_of_rows
from piper.runtime.accelerator import runs_triton
from piper.runtime.bucket_layout import Layout
from piper.runtime.comm.base import Group

if TYPE_CHECKING:
    from piper.runtime.cuda.fp8_rows import RowsByKernels

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST = LARGEST * 1e-30  # of a row's largest magnitude: rows of zeros have a scale too


class RowsByOperations:
    """The rows of a bucket in a flat tensor, whole or in part, rounded by operations of torch's."""

    def __init__(self, runs: Sequence[RowRun], start: int) -> None:
        """Keep runs of rows. start: the element of the bucket at which the tensor begins."""
        self.runs = [(slice(r.start - start, r.stop - start), slice(r.row, r.row + r.count)) for r in runs]

    def find_peaks(self, values: Tensor, peaks: Tensor) -> None:
        """Write the largest magnitudes of these rows into those of the bucket."""
        for here, rows in self.runs:
            part = values[here].view(rows.stop - rows.start, -1)
            peaks[rows] = torch.linalg.vector_norm(part, torch.inf, dim=1)

    def narrow(self, values: Tensor, peaks: Tensor, out: Tensor) -> None:
        """Round values to fp8."""
        inverse = LARGEST / peaks.clamp(min=LEAST)
        for here, rows in self.runs:
            part = values[here].view(rows.stop - rows.start, -1)
            out[here] = (part * inverse[rows, None]).view(-1)  # which casts: none is larger than its peak

    def widen(self, values: Tensor, peaks: Tensor, out: Tensor) -> None:
        """Write what fp8 numbers stand for."""
        scale = peaks.clamp(min=LEAST) * (1 / LARGEST)  # a quotient would be rounded otherwise on a GPU
        for here, rows in self.runs:
            there = out[here].view(rows.stop - rows.start, -1)
            there.copy_(values[here].view(there.shape))
            torch.mul(there, scale[rows, None], out=there)


def rows_within(runs: Sequence[RowRun], start: int, values: Tensor) -> "RowsByOperations | RowsByKernels":
    """Return what rounds rows of flat tensors like these values. start: as in `RowsByOperations`."""
    if runs and runs_triton(values.device) and values.dtype is not torch.float64:
        from piper.runtime.cuda.fp8_rows import RowsByKernels  # imports Triton

        return RowsByKernels(runs, start, values.device, smallest=LEAST, largest=LARGEST)
    return RowsByOperations(runs, start)


def gather_in_fp8(
    layout: Layout, group: Group, how: ShardCollective, own: Tensor
) -> Callable[[Tensor], None]:
    """Return a function that writes every member's shard of a bucket into a flat tensor, rounded."""
    bucket = layout.bucket
    spans = rows_of_shards(bucket)
    most, (first, _) = max(last - first for first, last in spans), spans[group.rank]
    mine = rows_within([*runs_of_rows(bucket, *layout.held)], layout.held[0], own)
    whole = rows_within([*runs_of_rows(bucket, 0, bucket.numel)], 0, own)
    rows = sum(piece.shape[0] for piece in bucket.pieces)
    wide = torch.float64 if own.dtype is torch.float64 else torch.float32

    def all_peaks() -> Tensor:
        """Return the largest magnitude of every row; a row in two shards has the larger of its two."""
        local = torch.zeros(rows + most, dtype=wide, device=own.device)
        mine.find_peaks(own, local)
        everyone = local.new_empty(most * group.size)
        group.all_gather(local[first : first + most], everyone)
        found = local.new_zeros(rows)
        for (low, high), part in zip(spans, everyone.split(most), strict=True):
            torch.maximum(found[low:high], part[: high - low], out=found[low:high])
        return found

    def gather_into(out: Tensor) -> None:
        peaks = all_peaks()
        narrow = torch.zeros(len(own), dtype=E4M3, device=own.device)
        mine.narrow(own, peaks, narrow)
        arrived = torch.empty(layout.length, dtype=torch.uint8, device=own.device)
        layout.gather(group, how, narrow.view(torch.uint8), arrived)
        whole.widen(arrived.view(E4M3), peaks, out)
        out[bucket.numel :] = 0

    return gather_into
