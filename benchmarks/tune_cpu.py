"""Does the tuned strategy win on real processes? Two workers, a small decoder, on an idle machine.

    python benchmarks/tune_cpu.py [--rounds 15]

Measures the costs of the model in one profiled run, tunes with them, and then runs the tuned strategy and
others that were written by hand in turns, one step each in every round. It refuses to judge where a loop of
fixed work takes more than 1.1 times its best: other work on the machine would decide. Prints the median step
of each, how the tuned one compares with the best of the others (at most 1.02), and on how many of the pairs
more than 5 % apart the predicted order agrees (at least 90 %).
"""

import argparse
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
from piper.simulate.measured import read_costs
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


def profiled() -> piper.Job:
    """The job under the strategy whose times are measured."""
    return replace(job(), strategy=pipeline("zero-bubble", 4))


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


def measured_costs(folder: Path) -> Path:
    """Profile a run of the model, and write its costs."""
    here = f"{Path(__file__)}:profiled"
    run, costs = folder / "run", folder / "costs.json"
    common = [sys.executable, "-m", "piper"]
    subprocess.run(
        [*common, "train", here, "--on", "local", "--steps", "8", "--profile", "4", "--out", str(run)],
        check=True,
        timeout=300,
    )
    subprocess.run([*common, "profile", str(run), "--calibrate", str(costs)], check=True, timeout=120)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    calm, stretch = quiet()
    if not calm:
        sys.exit(
            f"the machine is loaded: fixed work takes {stretch:.2f} times its best, so nothing is judged"
        )
    with tempfile.TemporaryDirectory() as name:
        costs = measured_costs(Path(name))
        found = piper.tune(job(), "cpu", 2, costs=costs, space=Space(recompute=Space().recompute[:1]))
        priced = read_costs(costs)
    candidates = {"tuned": list(found.best.strategy), **WRITTEN}
    base = job()
    programs: dict[str, Program] = {}
    for label, strategy in candidates.items():
        first = next(iter(programs.values()), None)
        programs[label] = compile(replace(base, strategy=strategy), captured=first)
    predicted = {
        label: simulate(program.plans, program.outline, priced).step for label, program in programs.items()
    }
    spent: dict[str, list[float]] = {label: [] for label in programs}
    batch = next(iter(job().data()))
    with ExitStack() as held:
        runs = {label: held.enter_context(piper.launch(p, on="local")) for label, p in programs.items()}
        for run in runs.values():
            run.step(batch)
        for _ in range(asked.rounds):
            for label, run in runs.items():
                begin = time.perf_counter()
                run.step(batch)
                spent[label].append(time.perf_counter() - begin)
    calm, stretch = quiet()
    if not calm:
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
