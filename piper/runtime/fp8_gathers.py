"""Gathers parameters in fp8: half the bytes of bf16.

Each row of a weight is rounded to e4m3 by a scale of its own, as products in fp8 round it
(docs/directives/precision.md). Those products round what arrives once more, to the very same numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from piper.plan.weight_rows import rows_of_shards, runs_of_rows
from piper.runtime.bucket_layout import Layout
from piper.runtime.comm.base import Group

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST = 1e-30  # a scale: rows of zeros have one too


def gather_in_fp8(layout: Layout, group: Group, own: Tensor) -> Callable[[Tensor], None]:
    """Return a function that writes every member's shard of a bucket into a flat tensor, rounded."""
    bucket = layout.bucket
    spans = rows_of_shards(bucket)
    most, (first, _) = max(last - first for first, last in spans), spans[layout.rank]
    mine = list(runs_of_rows(bucket, layout.start, layout.stop))
    pieces = list(runs_of_rows(bucket, 0, bucket.numel))
    rows = sum(piece.shape[0] for piece in bucket.pieces)
    wide = torch.float64 if own.dtype is torch.float64 else torch.float32

    def scales() -> Tensor:
        """Return the scale of every row; a row in two shards has the larger of its two magnitudes."""
        peaks = torch.zeros(most, dtype=wide, device=own.device)
        for run in mine:
            part = own[run.start - layout.start : run.stop - layout.start].view(run.count, -1)
            largest = torch.linalg.vector_norm(part, torch.inf, dim=1)
            peaks[run.row - first : run.row - first + run.count] = largest
        everyone = peaks.new_empty(most * group.size)
        group.all_gather(peaks, everyone)
        found = peaks.new_zeros(rows)
        for (low, high), part in zip(spans, everyone.split(most), strict=True):
            torch.maximum(found[low:high], part[: high - low], out=found[low:high])
        return (found / LARGEST).clamp(min=LEAST)

    def gather_into(out: Tensor) -> None:
        scale = scales()
        narrow = torch.zeros(len(own), dtype=torch.float8_e4m3fn, device=own.device)
        for run in mine:
            here = slice(run.start - layout.start, run.stop - layout.start)
            part = own[here].view(run.count, -1) / scale[run.row : run.row + run.count, None]
            narrow[here] = part.view(-1)  # which casts: nothing is larger than its row's largest
        arrived = torch.empty(layout.length, dtype=torch.uint8, device=own.device)
        if layout.shards is None:
            group.all_gather(narrow.view(torch.uint8), arrived)
        else:
            group.all_gather_uneven(narrow.view(torch.uint8), arrived, layout.shards)
        for run in pieces:
            there = out[run.start : run.stop].view(run.count, -1)
            there.copy_(arrived[run.start : run.stop].view(narrow.dtype).view(run.count, -1))
            torch.mul(there, scale[run.row : run.row + run.count, None], out=there)
        out[bucket.numel :] = 0

    return gather_into
