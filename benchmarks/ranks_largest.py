"""The largest microbatch that fits in the memory of a rank: Piper beside PipelineStage and FSDP2.

    python -m benchmarks.ranks_largest --rows largest_zero3 --gib 6
    python -m benchmarks.ranks_largest --device cpu --size tiny --eager  # no GPU: the losses alone

Two pipeline ranks of two replicas under 1F1B. Layers save only their inputs, on both sides. Memory is a line
in the samples of a microbatch: two small ones are measured, and with them the largest that fits is predicted.
It is confirmed by running it and the one above. It fits if tensors take at most so much at once on the worst
rank; with `--hard` the allocator of each rank refuses more, and the one above has to run out of memory.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.gpu_ranks import Report, arguments, started
from benchmarks.ranks_rows import RECOMPUTED
from benchmarks.ranks_sides import Failed, Figures, ProcessSide, Task, free_port, side_of

SIDES = ("peer", "piper")
STEPS = 3  # of which the last one is measured
PATIENCE = 200.0  # seconds for one run
TRIES = 4  # steps from the prediction at most


@dataclass(slots=True, kw_only=True)
class Runs:
    """Runs a row with microbatches of any size, each side at most once with each."""

    task: Task
    report: Report
    processes: Mapping[str, ProcessSide]
    gib: float
    hard: bool
    found: dict[tuple[str, int], Figures | None] = field(default_factory=dict)

    def run(self, side: str, samples: int, *, hard: bool = False) -> Figures | None:
        """Train with so many samples in a microbatch. None: it failed."""
        if (side, samples) not in self.found:
            one = replace(self.task, samples=samples, port=free_port(), gib=self.gib if hard else 0.0)
            for each in (self.processes[side], *self.processes.values()):
                each.start()  # those of the next side import torch meanwhile
            try:
                figures = self.processes[side].run(one, PATIENCE)
                self.report.add(one, side, samples, figures)
                self.found[side, samples] = figures
            except Failed as error:
                self.report.fail(one, side, samples, str(error))
                self.found[side, samples] = None
        return self.found[side, samples]

    def fits(self, side: str, samples: int) -> bool:
        """Return whether a microbatch of so many samples fits."""
        figures = self.run(side, samples, hard=self.hard)
        return figures is not None and figures.gib <= self.gib


def largest_on_line(gib: float, measured: Mapping[int, float]) -> int | None:
    """Return how many samples fit by the line through two measured ones. None: memory does not grow."""
    (few, less), (many, more) = sorted(measured.items())
    slope = (more - less) / (many - few)
    return math.floor(few + (gib - less) / slope) if slope > 0 else None


def confirmed(fits: Callable[[int], bool], guess: int) -> int | None:
    """Return the largest that fits, by steps of one from a guess. None: it is too far from there."""
    up = fits(guess)
    for _ in range(TRIES):
        guess += 1 if up else -1
        if fits(guess) != up:
            return guess - 1 if up else guess
    return None


def compare(runs: Runs, measured: Sequence[int]) -> None:
    """Measure a row, and print the largest microbatch of each side."""
    for samples in measured:
        both = [runs.run(side, samples) for side in SIDES]
        if None in both:
            return
        peer, ours = (one.losses for one in both if one is not None)
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours, peer, strict=True))
        print(f"{'':10}{runs.task.row:18}{samples} samples: losses apart by {apart:.1e}", flush=True)
    largest: dict[str, int | None] = {}
    for side in SIDES:
        points = {samples: runs.found[side, samples] for samples in measured}
        guess = largest_on_line(runs.gib, {n: one.gib for n, one in points.items() if one is not None})
        if guess is None or guess < 1:
            print(f"{'':10}{runs.task.row:18}{side}: no largest microbatch is known here", flush=True)
            continue
        print(f"{'':10}{runs.task.row:18}{side}: {guess} samples predicted in {runs.gib:g} GiB", flush=True)
        largest[side] = confirmed(lambda samples, side=side: runs.fits(side, samples), guess)  # type: ignore[misc]
        print(f"{'':10}{runs.task.row:18}{side}: {largest[side]} samples fit, one more does not", flush=True)
    ours_fit, peer_fit = largest.get("piper"), largest.get("peer")
    if ours_fit and peer_fit:
        speed = per_sample(runs, "piper", ours_fit) / per_sample(runs, "peer", peer_fit)
        print(
            f"{'':10}{runs.task.row:18}piper / peer: {ours_fit / peer_fit:.2f}x the samples in "
            f"{runs.gib:g} GiB of a rank, a sample takes {speed:.3f}x as long",
            flush=True,
        )


def per_sample(runs: Runs, side: str, samples: int) -> float:
    """Return the milliseconds of a step for each sample of a microbatch."""
    figures = runs.found[side, samples]
    assert figures is not None, "it fits, so it ran"
    return figures.ms / samples


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=6.0, help="the memory of a rank")
    parser.add_argument("--measured", default="8,16", help="two small numbers of samples in a microbatch")
    parser.add_argument("--hard", action="store_true", help="let allocators refuse more memory")
    options = arguments(parser, RECOMPUTED, words, steps=STEPS)
    measured = sorted(int(word) for word in options.measured.split(","))
    if len({*measured}) != 2:
        parser.error(f"--measured {options.measured}: two different numbers are needed")
    said = "benchmarks.ranks_largest " + " ".join(sys.argv[1:] if words is None else words)
    processes = {side: side_of(side) for side in SIDES}
    try:
        with started(options, said) as (task, report):
            for row in options.rows.split(","):
                runs = Runs(
                    task=replace(task, row=row),
                    report=report,
                    processes=processes,
                    gib=options.gib,
                    hard=options.hard and options.device == "cuda",
                )
                compare(runs, measured)
    finally:
        for each in processes.values():
            each.close()


if __name__ == "__main__":
    main()
