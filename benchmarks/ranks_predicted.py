"""How well the simulator predicts whole jobs of four NCCL ranks on one GPU.

    python -m benchmarks.ranks_predicted --profiles build/profiles
    python -m benchmarks.ranks_predicted --device cpu --size tiny --eager --steps 2  # no GPU: that it runs

One job of a model is profiled, and its costs predict others: one schedule from another. Each prediction is
printed before its job runs. A step is the time from its first instruction to its last, as the workers record
it; `driver` is the median that the driver sees, of the steps after the recording. The sizes, types and ranks
are those of `gpu_ranks`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import piper
from benchmarks.gpu_ranks import arguments, started
from benchmarks.ranks_rows import ROWS, SIZES, batch_of, job_of
from benchmarks.ranks_sides import Task
from piper.compiler import Program
from piper.run.launch import launch_local
from piper.runtime.recorders import WARM
from piper.runtime.worker import Options
from piper.simulate.calibrate import calibrate
from piper.simulate.profile import Profile, write_profile
from piper.simulate.simulate import simulate
from piper.train.measure import profile_of

PREDICTED: dict[str, Sequence[str]] = {  # by what is profiled
    "interleaved": ("1f1b", "zbv"),
    "pp2_ep2": ("dualpipev_ep2", "interleaved_ep2"),
    "pp2_ep2_wide": ("dualpipev_wide", "interleaved_wide"),
    "streams_one": ("streams_own",),
    "qwen3_ep4": (),
    "deepseek_ep4": (),
    "deepseek_pp2_ep2": (),
}
BAR = 0.10


def program_of(task: Task, row: str) -> Program:
    """Compile a row."""
    job = job_of(ROWS[row], SIZES[task.size], by_layer=task.by_layer)
    return piper.compile(job, device=task.device, compile=task.compiled, cache=task.cache)


def profiled(task: Task, row: str, program: Program) -> tuple[Profile, float]:
    """Record steps of a row, and return them and the median of later steps as the driver sees them."""
    batch = batch_of(ROWS[row], SIZES[task.size].shapes[row])
    share = "nccl" if task.device == "cuda" else "host"
    times = []
    with launch_local(program, Options(profile=task.steps, share=share, timeout=300)) as run:
        for _ in range(WARM + 2 * task.steps):
            start = time.perf_counter()
            run.step(batch)
            times.append(time.perf_counter() - start)
        return profile_of(run, program, row, "local"), statistics.median(times[-task.steps :])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", type=Path, help="a folder to which the profile of each row is written")
    options = arguments(parser, [*PREDICTED], words, steps=10)
    said = "benchmarks.ranks_predicted " + " ".join(sys.argv[1:] if words is None else words)
    torch.set_num_threads(1)
    with started(options, said) as (task, _):
        for row in options.rows.split(","):
            for name, profile in predict_from(task, row):
                if options.profiles is not None:
                    write_profile(profile, options.profiles / name)


def predict_from(task: Task, row: str) -> Iterator[tuple[str, Profile]]:
    """Profile a row, print what it predicts beside what is measured, and yield all profiles."""
    program = program_of(task, row)
    profile, driver = profiled(task, row, program)
    costs = calibrate(profile)
    line(row, simulate(program.plans, program.outline, costs).step, profile, driver, "the profiled job")
    yield row, profile
    for other in PREDICTED[row]:
        program = program_of(task, other)
        step = simulate(program.plans, program.outline, costs).step
        print(f"{task.size:8}{other:16} predicted {step * 1e3:8.1f} ms", flush=True)
        profile, driver = profiled(task, other, program)
        line(other, step, profile, driver, f"from {row}")
        yield other, profile


def line(row: str, step: float, profile: Profile, driver: float, source: str) -> None:
    """Print a prediction beside what was measured."""
    measured = statistics.median(profile.seconds(step) for step in range(profile.count))
    error = step / measured - 1
    held = "" if abs(error) <= BAR else f", above {BAR:.0%}"
    print(
        f"{'':8}{row:16} predicted {step * 1e3:8.1f} ms, measured {measured * 1e3:8.1f} ms, "
        f"driver {driver * 1e3:8.1f} ms: {error:+.1%} ({source}{held})",
        flush=True,
    )


if __name__ == "__main__":
    main()
