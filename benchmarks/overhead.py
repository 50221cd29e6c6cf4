"""What the executor costs per instruction on CPU: real plans, with kernels that do nothing."""

import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from piper import at, place, replicate, schedules, split
from piper.directives import Directive, apply
from piper.ir.graph import start
from piper.lower.lower import lower
from piper.lower.validate import validate
from piper.plan.plan import Plan
from piper.runtime.executor import Executor

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is found
from tests.chain import chain

ROUNDS = 15
LIMIT = 30.0  # microseconds


def nothing() -> None:
    """A kernel that does nothing."""


def seconds_per_instruction(plan: Plan, streams: bool) -> float:
    """The median over rounds of a step's time, divided by its instructions."""
    names = [*plan.residents, *plan.slots]
    index = {name: i for i, name in enumerate(names)}
    executor = Executor(
        plan,
        [nothing] * len(plan.instrs),
        [None] * len(names),
        index,
        device=plan.devices[0],
        streams=streams,
    )
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        executor.run()
        times.append(time.perf_counter() - begin)
    executor.close()
    return statistics.median(times) / len(plan.instrs)


def main() -> None:
    cases: dict[str, list[Directive]] = {
        "one device": [split(at(), parts=32)],
        "1f1b, 2 stages": [
            place(at(PP=0), 0),
            place(at(PP=1), 1),
            split(at(), parts=32),
            *schedules.one_f_one_b(2, 32),
        ],
        "zero bubble x zero=3": [
            replicate(at(PP=0), [0, 1], zero=3),
            replicate(at(PP=1), [2, 3], zero=3),
            split(at(), parts=32),
            *schedules.zero_bubble(2, 32),
        ],
    }
    print(f"{'plan':22} {'instructions':>12} {'in order of issue':>18} {'streams as threads':>19}   bar")
    for name, strategy in cases.items():
        plans, _ = lower(validate(apply(start(chain(2)), strategy)))
        plan = plans.plans[-1]
        inline, threads = (seconds_per_instruction(plan, streams) * 1e6 for streams in (False, True))
        print(
            f"{name:22} {len(plan.instrs):12} {inline:15.2f} us {threads:16.2f} us   at most {LIMIT:.0f} us"
        )


if __name__ == "__main__":
    main()
