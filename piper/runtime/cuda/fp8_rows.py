"""Kernels that round the rows of a flat tensor to fp8 and widen them, all rows in one launch.

Operation by operation each element would be read and written three times, in launches for every matrix. A
rank gathers its parameters twice for each microbatch, while its products need the memory's bandwidth.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from piper.plan.bucket import RowRun

BLOCK = 2048  # elements
ALIGNED = 16  # elements: where all rows begin and end at a multiple, kernels read many at a time


@triton.jit  # type: ignore[untyped-decorator]
def _find_peaks(  # type: ignore[no-untyped-def]  # Triton reads the types of arguments when it is called
    values, starts, stops, rows, peaks, blocks: tl.constexpr, aligned: tl.constexpr, size: tl.constexpr
) -> None:
    """Write the largest magnitude of one row."""
    run = tl.program_id(0)
    start, stop = tl.load(starts + run), tl.load(stops + run)
    if aligned:
        start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
    largest = tl.zeros([size], tl.float32)
    for block in range(blocks):
        places = start + block * size + tl.arange(0, size)
        value = tl.load(values + places, places < stop, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    tl.store(peaks + tl.load(rows + run), tl.max(largest, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _scale(  # type: ignore[no-untyped-def]  # as above
    values,
    starts,
    stops,
    rows,
    peaks,
    out,
    smallest,
    largest,
    unit,
    narrow: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Divide a block of a row by its scale and round it, or multiply it."""
    run = tl.program_id(0)
    start, stop = tl.load(starts + run), tl.load(stops + run)
    if aligned:
        start, stop = tl.multiple_of(start, 16), tl.multiple_of(stop, 16)
    peak = tl.maximum(tl.load(peaks + tl.load(rows + run)), smallest)
    # As torch computes `largest / peak`, so that ties fall to the same side.
    factor = tl.div_rn(1.0, peak) * largest if narrow else peak * unit
    places = start + tl.program_id(1) * size + tl.arange(0, size)
    inside = places < stop
    value = tl.load(values + places, inside, other=0.0).to(tl.float32) * factor
    tl.store(out + places, value.to(out.dtype.element_ty), inside)


class RowsByKernels:
    """The rows of a bucket that lie in a flat tensor, each whole or a part of it, for the kernels."""

    def __init__(
        self, runs: Sequence[RowRun], start: int, device: torch.device, *, smallest: float, largest: float
    ) -> None:
        """Keep where rows lie in a tensor that begins at `start` of a bucket, and the bounds of scales."""
        widths = [(run.stop - run.start) // run.count for run in runs]
        starts = [
            run.start - start + width * row
            for run, width in zip(runs, widths, strict=True)
            for row in range(run.count)
        ]
        lengths = [width for run, width in zip(runs, widths, strict=True) for _ in range(run.count)]
        rows = [run.row + row for run in runs for row in range(run.count)]
        self.starts = torch.tensor(starts, device=device)
        self.stops = self.starts + torch.tensor(lengths, device=device)
        self.rows = torch.tensor(rows, device=device)
        self.smallest, self.largest = smallest, largest
        self.blocks = triton.cdiv(max(widths), BLOCK)
        self.aligned = not any(place % ALIGNED for place in (*starts, *widths))

    def find_peaks(self, values: Tensor, peaks: Tensor) -> None:
        """Write the largest magnitudes of these rows into those of the bucket."""
        places = (self.starts, self.stops, self.rows)
        _find_peaks[len(self.rows),](
            values, *places, peaks, blocks=self.blocks, aligned=self.aligned, size=BLOCK
        )

    def narrow(self, values: Tensor, peaks: Tensor, out: Tensor) -> None:
        """Round values to fp8."""
        self._scaled(values, peaks, out, narrow=True)

    def widen(self, values: Tensor, peaks: Tensor, out: Tensor) -> None:
        """Write what fp8 numbers stand for."""
        self._scaled(values, peaks, out, narrow=False)

    def _scaled(self, values: Tensor, peaks: Tensor, out: Tensor, *, narrow: bool) -> None:
        _scale[len(self.rows), self.blocks](
            values,
            self.starts,
            self.stops,
            self.rows,
            peaks,
            out,
            self.smallest,
            self.largest,
            1 / self.largest,
            narrow=narrow,
            aligned=self.aligned,
            size=BLOCK,
        )
