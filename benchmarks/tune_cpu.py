"""Does the tuned strategy win on real processes? Two workers, a small decoder, on an idle machine.

    python benchmarks/tune_cpu.py [--rounds 15] [--cpu-time]

Measures the links of the machine, and the costs of the model in two profiled runs with microbatches of 8 and
2 samples, tunes with them, and then runs the tuned strategy and others that were written by hand in turns,
one step each in every round. It refuses to judge where a loop of fixed work takes more than 1.1 times its
best: other work on the machine would decide. Prints the median step of each, how the tuned one compares with
the best of the others (at most 1.02), and on how many of the pairs more than 5 % apart the predicted order
agrees (at least 90 %).

`--cpu-time` is for a machine with other work on it. It compares the CPU time of the workers in a step with
the time for which they occupy a core by the same costs. That says nothing about bubbles.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch

import piper
from piper import strategies
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.models import decoder
from piper.schedules.grid import orders
from piper.schedules.names import grid_for
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs
from piper.simulate.dependencies import InstructionCosts, weave
from piper.simulate.measured import MeasuredOn, read_costs
from piper.simulate.simulate import simulate
from piper.tuning.space import Space

LAYERS, SAMPLES, LENGTH = 8, 16, 64
LOADED = 1.1
CONFIG = decoder.Config(
    vocab=512, dim=128, layers=LAYERS, heads=4, kv_heads=4, head_dim=32, hidden=384, stages=LAYERS
)


def job() -> piper.Job:
    """The job to tune: each layer is a region PP."""
    tokens = torch.randint(512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    return piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}] * 1000,
    )


def large() -> piper.Job:
    """The job under a strategy whose times are measured: microbatches of 8 samples."""
    return replace(job(), strategy=pipeline("zero-bubble", 2))


def small() -> piper.Job:
    """The job under the other strategy whose times are measured: microbatches of 2 samples."""
    return replace(job(), strategy=pipeline("zero-bubble", 8))


def pipeline(schedule: str, microbatches: int, first: int = LAYERS // 2) -> list[Directive]:
    """Two stages on two workers."""
    stages = [piper.at(PP=range(first)), piper.at(PP=range(first, LAYERS))]
    return [
        *(piper.place(stage, [rank]) for rank, stage in enumerate(stages)),
        piper.split(piper.at(), parts=microbatches),
        *orders(grid_for(schedule, 2, microbatches), stage=stages),
    ]


WRITTEN: dict[str, list[Directive]] = {
    "ddp": strategies.ddp(2),
    "ddp, 4 microbatches": strategies.ddp(2, microbatches=4),
    "zero 1": strategies.fsdp(2, zero=1),
    "zero 3": strategies.fsdp(2, zero=3),
    "zero 3, 4 microbatches": strategies.fsdp(2, zero=3, microbatches=4),
    "1f1b, 8 microbatches": pipeline("1f1b", 8),
    "gpipe, 4 microbatches": pipeline("gpipe", 4),
    "zero-bubble, 8 microbatches": pipeline("zero-bubble", 8),
    "1f1b, uneven": pipeline("1f1b", 8, first=6),
}


def fixed_work() -> float:
    """Time a loop of fixed work."""
    begin = time.perf_counter()
    total = 0
    for number in range(2_000_000):
        total += number
    return time.perf_counter() - begin


def quiet(times: int = 7) -> tuple[bool, float]:
    """Return whether the machine is idle, and by how much the median of fixed work exceeds the best."""
    spent = [fixed_work() for _ in range(times)]
    stretch = statistics.median(spent) / min(spent)
    return stretch <= LOADED, stretch


def measured_costs(folder: Path, *, links: bool) -> tuple[Path, Path | str]:
    """Profile two runs of the model and write its costs. links: also measure the machine's, into a file.

    Links are measured by the clock on the wall, so other work of the machine makes them slow. Without them:
    those of `cpu`.
    """
    runs = [folder / recipe for recipe in ("large", "small")]
    for run in runs:
        here = f"{Path(__file__)}:{run.name}"
        piper_verb("train", here, "--on", "local", "--steps", "8", "--profile", "4", "--out", str(run))
    costs, machine = folder / "costs.json", folder / "machine.toml"
    piper_verb("profile", str(runs[0]), "--also", str(runs[1]), "--calibrate", str(costs))
    if not links:
        return costs, "cpu"
    piper_verb("profile", "--cluster-out", str(machine))
    return costs, machine


def piper_verb(*words: str) -> None:
    """Run a verb of the command line."""
    subprocess.run([sys.executable, "-m", "piper", *words], check=True, timeout=600)


def core_seconds(program: Program, costs: Costs) -> float:
    """Return for how long a step occupies cores, over all devices."""
    web = weave(program.plans)
    prices = InstructionCosts(web, {chunk.name: chunk for chunk in program.outline.chunks}, costs)
    spent = 0.0
    for number in range(len(web.instrs)):
        devices = len(program.plans.plans[web.program[number]].devices)
        if web.meeting[number] < 0:
            spent += devices * prices.seconds(number)
        else:
            talk = prices.talk(number)
            spent += devices * talk.cores * (talk.latency + talk.seconds)
    return spent


def step_seconds(program: Program, costs: Costs) -> float:
    """Return how long a step takes."""
    return simulate(program.plans, program.outline, costs).step


def workers_clock() -> float:
    """Return the CPU time of all processes that this one started, and of theirs, as Linux counts it."""
    tick, parents, spent = os.sysconf("SC_CLK_TCK"), {}, {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:  # it has ended
            continue
        if fields:
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / tick
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(spent[pid] for pid in found - {os.getpid()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time, on a loaded machine")
    asked = parser.parse_args()
    calm, stretch = quiet()
    if not calm and not asked.cpu_time:
        sys.exit(
            f"the machine is loaded: fixed work takes {stretch:.2f} times its best, so nothing is judged"
        )
    with tempfile.TemporaryDirectory() as name:
        costs, machine = measured_costs(Path(name), links=not asked.cpu_time)
        found = piper.tune(job(), machine, 2, costs=costs, space=Space(recompute=Space().recompute[:1]))
        priced = MeasuredOn(read_costs(costs), load_cluster(machine))
    candidates = {"tuned": list(found.best.strategy), **WRITTEN}
    base = job()
    programs: dict[str, Program] = {}
    for label, strategy in candidates.items():
        first = next(iter(programs.values()), None)
        programs[label] = compile(replace(base, strategy=strategy), captured=first)
    batch = next(iter(job().data()))
    clock = workers_clock if asked.cpu_time else time.perf_counter
    priced_by = core_seconds if asked.cpu_time else step_seconds
    predicted = {label: priced_by(program, priced) for label, program in programs.items()}
    spent: dict[str, list[float]] = {label: [] for label in programs}
    with ExitStack() as held:
        runs = {label: held.enter_context(piper.launch(p, on="local")) for label, p in programs.items()}
        for run in runs.values():
            run.step(batch)
        for _ in range(asked.rounds):
            for label, run in runs.items():
                begin = clock()
                run.step(batch)
                spent[label].append(clock() - begin)
    calm, stretch = quiet()
    if not calm and not asked.cpu_time:
        sys.exit(
            f"the machine became loaded: fixed work takes {stretch:.2f} times its best; nothing is judged"
        )
    judge({label: statistics.median(times) for label, times in spent.items()}, predicted)


def judge(medians: dict[str, float], predicted: dict[str, float]) -> None:
    """Print the figures, and end with 1 where one misses its limit."""
    for label in sorted(medians, key=lambda one: medians[one]):
        print(f"{medians[label] * 1e3:8.1f} ms measured {predicted[label] * 1e3:8.1f} ms predicted  {label}")
    best = min(spent for label, spent in medians.items() if label != "tuned")
    ratio = medians["tuned"] / best
    apart = [
        (one, other)
        for one, other in combinations(medians, 2)
        if max(medians[one], medians[other]) > 1.05 * min(medians[one], medians[other])
    ]
    agree = sum((medians[a] < medians[b]) == (predicted[a] < predicted[b]) for a, b in apart)
    print(f"tuned / best written by hand: {ratio:.3f} (at most 1.02)")
    print(f"predicted order agrees on {agree} of {len(apart)} pairs more than 5 % apart (at least 90 %)")
    sys.exit(0 if ratio <= 1.02 and agree >= 0.9 * len(apart) else 1)


if __name__ == "__main__":
    main()
