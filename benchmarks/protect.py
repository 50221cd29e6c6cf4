"""What copies of the state cost in CPU time: no copies, copies between steps, and copies by the plan.

Steps of all kinds alternate in one process, so that whatever else the machine does falls on all of them. On
a machine that does much else, two steps differ by more than copies cost; so the CPU time of the threads while
they copy is added up as well.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

os.environ["OMP_NUM_THREADS"] = "1"

from piper import at, protect
from piper.compiler import Program, compile
from piper.data.feed import Feed
from piper.directives import Directive
from piper.recipe import load_recipe
from piper.run.launch import launch_inline
from piper.run.run import Run
from piper.runtime.worker import Options
from piper.workers.inline import InlineWorkerGroup
from piper.workers.transport.versions import Versions, WorkerVersions

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


class Spent:
    """Adds up the CPU time of the threads that are inside some methods of an object."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: object, *names: str) -> None:
        """Count the time inside methods of an object from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, act: Callable[..., object]) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            begin = time.thread_time()
            try:
                return act(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def compiled(recipe: str, more: list[Directive] | None) -> Program:
    """Compile a recipe with directives added to its strategy."""
    job = load_recipe(recipe)
    return compile(replace(job, strategy=[*job.strategy, *(more or [])]))


def kept_by(run: Run) -> list[WorkerVersions]:
    """Return what copies the states of a run's devices."""
    answers = cast(InlineWorkerGroup, run.session.group).answers.values()
    return [each.versions for each in answers if each.versions is not None]


def main(recipe: str, rounds: int) -> None:
    """Measure, and print a table."""
    with ExitStack() as held:
        runs: dict[str, tuple[Run, Versions]] = {}
        for name, more in WAYS.items():
            program = compiled(recipe, more)
            versions = Versions(program.plans)
            held.callback(versions.close)
            run = launch_inline(program, Options(), None if more is None else versions.files)
            held.callback(run.close)
            run.session.protect()
            runs[name] = run, versions
        copying = {name: Spent() for name in runs}
        for name, (run, _) in runs.items():
            for kept in kept_by(run):
                copying[name].watch(kept, "write", "copy", "outgoing", "take")
        feeds = {name: Feed(run.program.job.data, run.program.job.seed) for name, (run, _) in runs.items()}
        spent: dict[str, list[float]] = {name: [] for name in runs}
        results: dict[str, list[object]] = {name: [] for name in runs}
        for number in range(rounds + WARM):
            if number == WARM:
                for clock in copying.values():
                    clock.seconds = 0.0
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
            inside = copying[name].seconds / sum(times)
            print(
                f"{name:18} {1e3 * statistics.median(times):8.1f} ms  {100 * more_cost:+5.1f} %  in copies "
                f"{100 * inside:4.1f} %, at most {LIMIT:.0f} %  {held_bytes / 2**20:6.1f} MiB held"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else RECIPE, int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
