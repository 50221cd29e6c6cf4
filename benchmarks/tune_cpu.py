"""Does the tuned strategy win on real processes? Two workers, a small decoder, on an idle machine.

    python benchmarks/tune_cpu.py [--rounds 15] [--measure 5] [--cpu-time]

Measures the links of the machine, and the costs of the model in two profiled runs with microbatches of 8 and
2 samples, tunes with them as `piper tune --measure 5` does, and then runs the tuned strategy and others that
were written by hand in turns: one step each in every round, in an order that changes, with new processes
after every three rounds, as in the search. A tuned strategy that is one of those written by hand runs once.
It refuses to judge where a loop of fixed work takes more than 1.1 times its best: other work on the machine
would decide. Prints the median step of each, how the tuned one compares with the best of the others (at most
1.02), and on how many of the pairs more than 5 % apart the predicted order agrees (at least 90 %).

`--cpu-time` is for a machine with other work on it, and the tuned strategy is then the best by prediction. It
compares the CPU time of the workers in a step with the time for which they occupy a core by the same costs.
That says nothing about bubbles.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from random import Random

import torch

import piper
from piper import strategies
from piper.compiler import Program, compile
from piper.directives import Directive
from piper.models import decoder
from piper.run.launch import launch_local
from piper.schedules.grid import grid_for, orders
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs
from piper.simulate.engine import InstructionCosts, weave
from piper.simulate.measured import MeasuredOn, read_costs
from piper.simulate.simulate import simulate
from piper.tuning.result import Tuned
from piper.tuning.space import Space
from piper.tuning.trial_runs import LOADED, ROUNDS, margin_of, stretch
from piper.workers.transport.fork_server import ForkServer

LAYERS, SAMPLES, LENGTH = 8, 16, 64
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
    parser.add_argument("--measure", type=int, default=5, help="how many candidates the search runs")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time, on a loaded machine")
    asked = parser.parse_args()
    if not asked.cpu_time:
        refuse_load("is")
    with tempfile.TemporaryDirectory() as name:
        costs, machine = measured_costs(Path(name), links=not asked.cpu_time)
        found = piper.tune(
            job(),
            machine,
            2,
            costs=costs,
            space=Space(recompute=Space().recompute[:1]),
            measure=None if asked.cpu_time else asked.measure,
        )
        priced = MeasuredOn(read_costs(costs), load_cluster(machine))
    print_search(found)
    same = next((label for label, strategy in WRITTEN.items() if strategy == found.strategy), None)
    candidates = WRITTEN if same is not None else {"tuned": list(found.best.strategy), **WRITTEN}
    base = job()
    programs: dict[str, Program] = {}
    for label, strategy in candidates.items():
        first = next(iter(programs.values()), None)
        programs[label] = compile(replace(base, strategy=strategy), captured=first)
    batch = next(iter(job().data()))
    clock = workers_clock if asked.cpu_time else time.perf_counter
    priced_by = core_seconds if asked.cpu_time else step_seconds
    predicted = {label: priced_by(program, priced) for label, program in programs.items()}
    spent: dict[str, list[list[float]]] = {label: [] for label in programs}  # in each start
    for begun in range(0, asked.rounds, ROUNDS):
        with ExitStack() as held:
            forks = held.enter_context(closing(ForkServer()))
            runs = {
                label: held.enter_context(launch_local(program, forks=forks))
                for label, program in programs.items()
            }
            for label, run in runs.items():
                run.step(batch)
                spent[label].append([])
            for number in range(begun, min(begun + ROUNDS, asked.rounds)):
                for label in Random(number).sample(list(runs), len(runs)):
                    begin = clock()
                    runs[label].step(batch)
                    spent[label][-1].append(clock() - begin)
    if not asked.cpu_time:
        refuse_load("became")
    print(f"equal strategies would differ by {margin_of(list(spent.values())):.3f}, as starts do")
    medians = {label: statistics.median(chain.from_iterable(starts)) for label, starts in spent.items()}
    judge(medians, predicted, same or "tuned")


def print_search(found: Tuned) -> None:
    """Print what the search measured."""
    for one in found.ranked[: 1 if found.trial is None else len(found.trial.runs)]:
        took = found.measured(one)
        text = "" if took is None else f"{took * 1e3:8.1f} ms measured "
        print(f"{text}{one.step * 1e3:8.1f} ms predicted  {one.choice.label}: {found.reason(one)}")
    if found.trial is not None:
        print(f"equal strategies would differ by {found.trial.margin:.3f}, as starts do. {found.trial.note}")
    print()


def refuse_load(since: str) -> None:
    """End where other work on the machine would decide."""
    load = stretch()
    if load > LOADED:
        sys.exit(f"the machine {since} loaded: fixed work takes {load:.2f} times its best; nothing is judged")


def judge(medians: dict[str, float], predicted: dict[str, float], tuned: str) -> None:
    """Print the figures, and end with 1 where one misses its limit. tuned: the label of that strategy."""
    for label in sorted(medians, key=lambda one: medians[one]):
        name = f"{label} (tuned)" if label == tuned != "tuned" else label
        print(f"{medians[label] * 1e3:8.1f} ms measured {predicted[label] * 1e3:8.1f} ms predicted  {name}")
    best = min(spent for label, spent in medians.items() if label != "tuned")
    ratio = medians[tuned] / best
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
