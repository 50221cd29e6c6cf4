"""What copies of the state cost in CPU time: no copies, copies between steps, and copies by the plan.

Steps of the three alternate in one process, so that whatever else the machine does falls on all of them.
"""

import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"

from piper import at, protect
from piper.compiler import Program, compile
from piper.data.feed import Feed
from piper.directives import Directive
from piper.launchers.inline import InlineRun
from piper.launchers.transport.versions import Versions
from piper.recipe import load_recipe
from piper.runtime.worker import Options

RECIPE = "recipes/moe_dualpipe.py:demo"
ROUNDS = 40
WARM = 5
LIMIT = 3.0  # per cent
WAYS: dict[str, list[Directive] | None] = {
    "no copies": None,
    "between steps": [],
    "protect": [protect(at())],
    "protect, copies=1": [protect(at(), copies=1, apart="device")],
}


def compiled(recipe: str, more: list[Directive] | None) -> Program:
    """Compile a recipe with directives added to its strategy."""
    job = load_recipe(recipe)
    return compile(replace(job, strategy=[*job.strategy, *(more or [])]))


def main(recipe: str, rounds: int) -> None:
    """Measure, and print a table."""
    with ExitStack() as held:
        runs: dict[str, tuple[InlineRun, Versions]] = {}
        for name, more in WAYS.items():
            program = compiled(recipe, more)
            versions = Versions(program.plans)
            held.callback(versions.close)
            run = InlineRun(program, Options(), None if more is None else versions.files)
            held.callback(run.close)
            run.protect()
            runs[name] = run, versions
        feeds = {name: Feed(run.program.job.data, run.program.job.seed) for name, (run, _) in runs.items()}
        spent: dict[str, list[float]] = {name: [] for name in runs}
        results: dict[str, list[object]] = {name: [] for name in runs}
        for number in range(rounds + WARM):
            for name, (run, _) in runs.items():
                batch = next(feeds[name])
                begin = time.process_time()
                results[name].append(run.step(batch))
                if number >= WARM:
                    spent[name].append(time.process_time() - begin)
        assert all(found == results["no copies"] for found in results.values()), "the numbers differ"
        before = spent["no copies"]
        print(f"{recipe}, {rounds} steps of each, in turn; CPU time of a step")
        for name, times in spent.items():
            held_bytes = sum(
                os.fstat(d).st_blocks * 512 for pair in runs[name][1].descriptors.values() for d in pair
            )
            more_cost = statistics.median(t / b - 1 for t, b in zip(times, before, strict=True))
            print(
                f"{name:18} {1e3 * statistics.median(times):8.1f} ms  {100 * more_cost:+5.1f} %"
                f"  {held_bytes / 2**20:6.1f} MiB held   at most {LIMIT:.0f} %"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else RECIPE, int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
