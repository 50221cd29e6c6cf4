"""What a compiled backward gains on CPU when it adds its gradients to the sum of earlier microbatches itself.

Both sides run the same compiled code on one rank (`rank:0`), in turns. One side adds in the backward. On the
other side gradients have memory of their own, and an instruction adds them to the sum. The times are CPU
times of the process, so that other work on the machine counts little. The peak is that of resident memory, in
a process for each side.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import piper
from piper.compiler import Program
from piper.lower import reductions
from piper.models import decoder
from piper.plan.memory_timeline import timeline
from piper.process.attributes import replaced
from piper.run.launch import launch_single_rank

SIDES = ("added", "apart")
ROUNDS, PARTS, REPLICAS = 15, 8, 2
VOCABULARY, WIDTH = 256, 512
CONFIG = decoder.Config(
    vocab=VOCABULARY, dim=WIDTH, layers=4, heads=8, kv_heads=8, head_dim=64, hidden=1408, stages=1
)


@contextmanager
def side_of(side: str) -> Iterator[None]:
    """Compile as one of the two sides."""
    apart = replaced(reductions, "writes_flat", lambda *_: False) if side == "apart" else nullcontext()
    with apart:
        yield


def program_of(side: str, zero: int, length: int, cache: str) -> Program:
    """Return one side's program. Microbatches hold one sample of so many tokens."""
    tokens = torch.randint(VOCABULARY, (REPLICAS * PARTS, length))
    batch = {"tokens": tokens, "labels": tokens}
    job = piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.loss,
        data=lambda: [batch],
        strategy=[
            piper.replicate(piper.at(PP=0), [*range(REPLICAS)], zero=zero),
            piper.split(piper.at(), parts=PARTS),
            *piper.schedules.gpipe(1, PARTS),
        ],
    )
    with side_of(side):
        return piper.compile(job, device="cpu", compile=True, cache=cache)


def megabytes_of_peak(side: str, zero: int, length: int, cache: str) -> float:
    """Return the most memory that a process has resident in two steps."""
    program = program_of(side, zero, length, cache)
    batch = program.job.data()[0]
    with launch_single_rank(program, "rank:0") as run:
        run.step(batch)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run.step(batch)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) / 1e3


def seconds(zero: int, length: int, cache: str) -> dict[str, list[float]]:
    """Return the CPU seconds of steps of both sides, in turns."""
    programs = {side: program_of(side, zero, length, cache) for side in SIDES}
    taken: dict[str, list[float]] = {side: [] for side in SIDES}
    with (
        launch_single_rank(programs["added"], "rank:0") as first,
        launch_single_rank(programs["apart"], "rank:0") as second,
    ):
        runs = dict(zip(SIDES, (first, second), strict=True))
        for number in range(ROUNDS + 1):
            for side in SIDES if number % 2 else SIDES[::-1]:
                batch = programs[side].job.data()[0]
                begin = time.process_time()
                runs[side].step(batch)
                if number:  # the first warms up
                    taken[side].append(time.process_time() - begin)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", nargs=4, metavar=("SIDE", "ZERO", "LENGTH", "CACHE"), help="of one side")
    asked = parser.parse_args().peak
    if asked:
        print(megabytes_of_peak(asked[0], int(asked[1]), int(asked[2]), asked[3]))
        return
    print(f"{'zero':>4} {'tokens':>6} {'added':>9} {'apart':>9} {'ratio':>6}   planned MB      resident MB")
    with TemporaryDirectory() as cache:
        for length in (32, 128):
            for zero in (0, 1, 3):
                taken = seconds(zero, length, cache)
                added, apart = (statistics.median(taken[side]) for side in SIDES)
                planned = [
                    timeline(program_of(side, zero, length, cache).plans.of(0)).peak / 1e6 for side in SIDES
                ]
                peaks = []
                for side in SIDES:
                    command = [sys.executable, __file__, "--peak", side, str(zero), str(length), cache]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    peaks.append(float(done.stdout.split()[-1]))
                print(
                    f"{zero:4} {length:6} {added:7.3f} s {apart:7.3f} s {added / apart:6.3f}"
                    f"   {planned[0]:6.1f} {planned[1]:6.1f}   {peaks[0]:6.0f} {peaks[1]:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
