"""Activations and optimizer state on the host, on one GPU: what fits, what a step takes, what was predicted.

The ranks are those of `gpu.py`: PP8 x DP4 at zero=3, 36 layers of width 4096, random arrivals, with
8 microbatches, all of which are under way in the first stage before its first backward.

python benchmarks/gpu_offload.py [--rows fit,state] [--limit 40] [--commit HASH]
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu import (
    DENSE,
    GIB,
    LARGE,
    Choices,
    Line,
    attempt,
    batch_of,
    clean,
    heading,
    job_of,
    pipeline_strategy,
    timed,
)

import piper
from piper.compiler import Program
from piper.models import decoder
from piper.plan.memory_timeline import host_peak, timeline
from piper.run.launch import launch_single_rank
from piper.runtime.memory_release import predicted_peak
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate_alone

PARTS = 8
MICROBATCHES = 16  # of a model on one device, 4 x 2048 tokens each
ROOM = 12  # GiB, in which the 0.94B model and its state do not fit: they have 12.3
SLOWER = 1.25  # times the step of a device that has room for the state, at most
OPTIMIZER = "offload(at(), what='optimizer')"
LARGER = 1.3  # times the microbatch of recomputation alone, at least
MEMORY, TIME = 0.03, 0.10  # of what was measured: how far predictions may be off
LEAST = "remat(at(), 0, across='PP')"
ALONE = "remat(at(LAYER='*'), 1, across='LAYER')"
AWAY = "remat(at(), 0), offload(at())"
SIZES = {
    LEAST: 40,
    ALONE: 32,
    AWAY: 48,
}  # samples of a microbatch that fits; a second one is tried near the limit
CONSTANT = 2.5 * GIB  # beyond the state, whatever the microbatch: gathered parameters and their gradients
MOST = 160  # samples that are tried: more take minutes
LOCAL = replace(LARGE, vocab=64, dim=32, layers=8, heads=2, kv_heads=1, head_dim=16, hidden=64)  # for a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a rank, and those that were predicted."""

    seconds: float
    peak: int
    predicted_s: float
    predicted: int
    host: int  # bytes of the host's memory
    resident: int

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.0f} ms {self.peak / GIB:.2f} GiB, host {self.host / GIB:.1f} GiB"


def rank_program(
    config: decoder.Config, size: int, side: str, cache: str, device: str, length: int
) -> tuple[Program, dict[str, torch.Tensor]]:
    """Compile one side of the comparison, for a microbatch of some samples."""
    batch = batch_of(config, 4 * PARTS * size, length)
    recompute = {LEAST: Choices(budget=0.0, across="PP", table=2), AWAY: Choices(budget=0.0, table=2)}
    strategy = pipeline_strategy(3, PARTS, recompute.get(side, Choices(table=2)))
    if side == ALONE:
        strategy.append(piper.remat(piper.at(LAYER="*"), 1, across="LAYER"))
    if side == AWAY:
        strategy.append(piper.offload(piper.at(PP=0), least_mb=1 if device == "cuda" else 0))
    job = job_of(replace(config, by_layer=True), batch, strategy)
    return piper.compile(job, device=device, compile=device == "cuda", cache=cache), batch


def measured(program: Program, batch: dict[str, torch.Tensor], steps: int) -> Measured:
    """Run the first rank of a program: one step to warm up, then some that are timed."""
    device = program.device
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    with ExitStack() as stack:
        run = stack.enter_context(launch_single_rank(program, "rank:0"))
        run.step(batch)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            seconds, _ = timed(lambda: run.step(batch), steps)
        else:
            begin = time.perf_counter()
            run.step(batch)
            seconds = time.perf_counter() - begin
        held = run.peak()
        plan = program.plans.of(0)
        costs = Roofline(load_cluster("h200" if device == "cuda" else "cpu"))
        return Measured(
            seconds=seconds,
            peak=(held.measured or 0) - others,
            predicted_s=simulate_alone(program.plans, program.outline, costs, 0).step,
            predicted=held.predicted,
            host=host_peak(plan),
            resident=timeline(plan).resident,
        )


def once(config: decoder.Config, size: int, side: str, cache: str, device: str, length: int) -> Measured:
    """Compile and run one side."""
    if device == "cuda":
        clean()
    return measured(*rank_program(config, size, side, cache, device, length), steps=1)


def predicted(what: str, found: Measured) -> Iterator[Line]:
    """Compare what was predicted with what was measured."""
    memory, seconds = found.predicted / max(1, found.peak) - 1, found.predicted_s / found.seconds - 1
    yield Line(
        what=f"{what}: predicted peak",
        got=f"{found.predicted / GIB:.2f} GiB of {found.peak / GIB:.2f} GiB: {100 * memory:+.1f} %",
        bar=f"within {100 * MEMORY:.0f} %",
        holds=abs(memory) <= MEMORY,
    )
    yield Line(
        what=f"{what}: predicted step",
        got=f"{found.predicted_s * 1e3:.0f} ms of {found.seconds * 1e3:.0f} ms: {100 * seconds:+.1f} %",
        bar=f"within {100 * TIME:.0f} %",
        holds=abs(seconds) <= TIME,
    )


def fit(cache: str, limit: int, device: str) -> Iterator[Line]:
    """The largest microbatch of stage 0 within a limit, and the time of a sample, with and without offload.

    Memory grows evenly with the microbatch: two sizes say where the limit lies.
    """
    config, length = (LARGE, 1024) if device == "cuda" else (LOCAL, 16)
    largest: dict[str, float] = {}
    a_sample: dict[str, float] = {}
    for side, first in SIZES.items():
        sizes, peaks = [first if device == "cuda" else 1], list[int]()
        for size in sizes:  # which grows by one
            what = f"stage 0, {size} x {length}, {side}"
            result = attempt(partial(once, config, size, side, cache, device, length))
            if isinstance(result, str):
                yield Line(what=what, got=result)
                break
            yield Line(what=what, got=f"{result}; {result.seconds * 1e3 / size / PARTS:.2f} ms a sample")
            yield from predicted(what, result)
            peaks.append(result.peak)
            a_sample[side] = result.seconds / size
            if len(sizes) < 2:
                slope = max(1.0, (result.peak - result.resident - CONSTANT) / size)
                sizes.append(
                    max(
                        size + 1,
                        min(
                            MOST if device == "cuda" else 2,
                            size + int(0.9 * (limit * GIB - result.peak) / slope),
                        ),
                    )
                )
        if len(peaks) == 2:
            slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
            largest[side] = sizes[0] + (limit * GIB - peaks[0]) / max(1.0, slope)
    for side in (LEAST, ALONE) if len(largest) == len(SIZES) else ():
        ratio, slower = largest[AWAY] / largest[side], a_sample[AWAY] / a_sample[side]
        yield Line(
            what=f"largest microbatch in {limit} GiB, beside {side}",
            got=f"{largest[AWAY]:.0f} with offload, {largest[side]:.0f} without: {ratio:.2f}x, "
            f"{slower:.2f}x the time of a sample",
            bar=f"at least {LARGER}x, at most 1.00x",
            holds=ratio >= LARGER and slower <= 1.0,
        )


def state_program(config: decoder.Config, cache: str, device: str, length: int, *, away: bool) -> Program:
    """Compile a model on one device, layer by layer, its optimizer's state on the host or not."""
    batch = batch_of(config, 4 * MICROBATCHES, length)
    more = [piper.offload(piper.at(), what="optimizer")] if away else []
    parts = piper.split(piper.at(), axis="MB", parts=MICROBATCHES)
    job = job_of(replace(config, by_layer=True), batch, [piper.place(piper.at(), [0]), *more, parts])
    return piper.compile(job, device=device, compile=device == "cuda", cache=cache)


def state(cache: str, limit: int, device: str) -> Iterator[Line]:
    """Train 0.94B where parameters and state do not fit, beside a device that has room for them."""
    config, length = (DENSE, 2048) if device == "cuda" else (replace(LOCAL, stages=1), 16)
    found: dict[bool, Measured] = {}
    for away in (False, True):
        if device == "cuda":
            clean()
        result = attempt(partial(one_device, config, cache, device, length, away=away))
        what = f"one device, {MICROBATCHES} x 4 x {length}, " + (OPTIMIZER if away else "without offload")
        yield Line(what=what, got=str(result))
        if isinstance(result, Measured):
            yield from predicted(what, result)
            found[away] = result
    if len(found) == 2:
        slower, held = found[True].seconds / found[False].seconds, found[True].peak / GIB
        yield Line(
            what=f"optimizer state on the host, in {ROOM} GiB",
            got=f"{held:.2f} GiB, {slower:.3f}x the step of {found[False].peak / GIB:.2f} GiB",
            bar=f"in {ROOM} GiB, at most {SLOWER}x",
            holds=held <= ROOM and slower <= SLOWER,
        )


def one_device(config: decoder.Config, cache: str, device: str, length: int, *, away: bool) -> Measured:
    """Train a few steps on one device."""
    program = state_program(config, cache, device, length, away=away)
    others = torch.cuda.memory_allocated() if device == "cuda" else 0
    batch = batch_of(config, 4 * MICROBATCHES, length)
    plan = program.plans.of(0)
    with piper.launch(program, on="inline") as run:
        run.step(batch)
        run.step(batch)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            seconds, _ = timed(lambda: run.step(batch), 4)
        else:
            begin = time.perf_counter()
            run.step(batch)
            seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - others if device == "cuda" else 0
    costs = Roofline(load_cluster("h200" if device == "cuda" else "cpu"))
    return Measured(
        seconds=seconds,
        peak=peak,
        predicted_s=simulate_alone(program.plans, program.outline, costs, 0).step,
        predicted=predicted_peak(plan),
        host=host_peak(plan),
        resident=timeline(plan).resident,
    )


ROWS: dict[str, Callable[[str, int, str], Iterator[Line]]] = {"fit": fit, "state": state}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--limit", type=int, default=40, help="GiB of a device (40)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu tries the script only")
    parser.add_argument("--out", default="")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "piper-bench-cache"))
    parser.add_argument("--commit", default="")
    asked = parser.parse_args(words)
    text = heading(
        f"python benchmarks/gpu_offload.py --rows {asked.rows} --limit {asked.limit}", asked.commit
    )
    print(text, flush=True)
    for row in asked.rows.split(","):
        begin = time.perf_counter()
        for line in ROWS[row](asked.cache, asked.limit, asked.device):
            print(line, flush=True)
            text += f"\n{line}"
        print(f"  ({row}: {time.perf_counter() - begin:.0f} s)", flush=True)
        if asked.out:
            Path(asked.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
