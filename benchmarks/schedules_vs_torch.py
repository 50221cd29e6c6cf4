"""Compares each schedule with torch.distributed.pipelining's of the same name: time, and activations held.

    python benchmarks/schedules_vs_torch.py

Time is in units of one forward (F = I = W = 1, B = 2), transfers free, computed for both sides by the same
clock. Torch has no plain zero-bubble, and the order its 1F1B gives skips a microbatch on the last rank: its
interleaved schedules with one stage per rank stand in for both. Then how long large grids take to build.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as peer

from piper.errors import ScheduleError
from piper.schedules.grid import NAMES, Grid, grid_for, orders
from piper.schedules.timing import makespan
from piper.schedules.torch_csv import parse_csv, read_csv, validate
from tests.schedules.activations import peak_activations

RANKS = (2, 3, 4, 8)
PEERS: dict[str, Callable[..., peer._PipelineScheduleRuntime]] = {
    "1f1b": peer.ScheduleInterleaved1F1B,
    "interleaved-1f1b": peer.ScheduleInterleaved1F1B,
    "zero-bubble": peer.ScheduleInterleavedZeroBubble,
    "interleaved-zero-bubble": peer.ScheduleInterleavedZeroBubble,
    "zbv": peer.ScheduleZBVZeroBubble,
    "dualpipe-v": peer.ScheduleDualPipeV,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One schedule at one size, ours and torch's."""

    name: str
    ranks: int
    microbatches: int
    ours: float | None  # None: refused
    theirs: float | None
    our_peak: int | None
    their_peak: int | None

    @property
    def ok(self) -> bool:
        """Are we at least as fast wherever torch has this schedule?"""
        return self.theirs is None or (self.ours is not None and self.ours <= self.theirs)


def microbatch_counts(ranks: int) -> list[int]:
    """Few, just enough, odd and many."""
    return sorted({1, ranks - 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 2 * ranks + 3, 20})


def bare_stages(ranks: int, stages_per_rank: int) -> list[SimpleNamespace]:
    """What torch's schedules look at in a stage before anything runs."""
    stage = SimpleNamespace(num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None)
    return [stage] * stages_per_rank


def torch_grid(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Grid | None:
    """Torch's schedule, read from the CSV that torch writes; None where torch has none of this size."""
    if name == "gpipe":
        gpipe = peer.ScheduleGPipe.__new__(peer.ScheduleGPipe)
        gpipe._num_stages, gpipe._n_microbatches = ranks, microbatches
        rows = (gpipe._get_pipeline_order() or {}).values()
        return parse_csv("\n".join(",".join(str(cell or "") for cell in row) for row in rows), by="torch")
    if name not in PEERS:
        return None
    try:
        schedule = PEERS[name](bare_stages(ranks, stages_per_rank), microbatches)
    except ValueError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.csv"
        schedule._dump_csv(str(path), format="compute_only")
        return read_csv(path)


def compare(name: str, ranks: int, microbatches: int) -> Result:
    """Build both sides of one cell."""
    stages_per_rank = NAMES[name].stages_per_rank
    try:
        ours = grid_for(name, ranks, microbatches, stages_per_rank)
    except ScheduleError:
        ours = None  # DualPipe needs more microbatches, or an even number of ranks
    theirs = torch_grid(name, ranks, microbatches, stages_per_rank)
    return Result(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        ours=None if ours is None else makespan(ours),
        theirs=None if theirs is None else makespan(theirs),
        our_peak=None if ours is None else max(peak_activations(ours)),
        their_peak=None if theirs is None else max(peak_activations(theirs)),
    )


def results() -> Iterator[Result]:
    """Every schedule at every size."""
    for name in NAMES:
        for ranks in RANKS:
            for microbatches in microbatch_counts(ranks):
                yield compare(name, ranks, microbatches)


def show(number: float | None) -> str:
    """A number, or a dash where there is none."""
    return "-" if number is None else f"{number:g}"


def main() -> int:
    """Print the table; fail if torch is faster anywhere."""
    print(f"{'schedule':24} {'ranks':>5} {'mb':>4} {'ours':>6} {'torch':>6} {'peak':>5} {'torch':>6}")
    worse = 0
    for result in results():
        worse += not result.ok
        print(
            f"{result.name:24} {result.ranks:5} {result.microbatches:4} {show(result.ours):>6} "
            f"{show(result.theirs):>6} {show(result.our_peak):>5} {show(result.their_peak):>6}"
            f"{'' if result.ok else '  slower'}"
        )
    print(f"slower than torch in {worse} cells\n")
    for name in NAMES:
        begin = time.perf_counter()
        grid = grid_for(name, 64, 256)
        built = time.perf_counter()
        validate(grid)
        checked = time.perf_counter()
        orders(grid)
        print(
            f"{name:24} 64 ranks, 256 microbatches: build {built - begin:.2f} s, "
            f"validate {checked - built:.2f} s, directives {time.perf_counter() - checked:.2f} s"
        )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
