"""How long the executor takes per instruction, when kernels do nothing: with a thread per stream and without.

python benchmarks/overhead.py
"""

import statistics
import time

from piper.directives import Directive, apply, order, replicate, split
from piper.ir.chain import chain
from piper.ir.graph import start
from piper.ir.select import at
from piper.lower.lower import lower
from piper.plan.plan import Plan
from piper.runtime.executor import Executor

STAGES, PARTS, ROUNDS = 4, 32, 21


def a_plan() -> Plan:
    """The second stage of a pipeline with ZeRO-2: computes, transfers and reductions on several streams."""
    strategy: list[Directive] = [replicate(at(PP=p), [2 * p, 2 * p + 1], zero=2) for p in range(STAGES)]
    strategy.append(split(at(), parts=PARTS))
    for stage in range(STAGES):
        ahead = min(STAGES - stage, PARTS)
        steps = [("F", i) for i in range(ahead)]
        for i in range(PARTS):
            steps.append(("B", i))
            if ahead + i < PARTS:
                steps.append(("F", ahead + i))
        strategy.append(order([[at(PP=stage, MB=m, PASS=phase)] for phase, m in steps]))
    plans, _ = lower(apply(start(chain(STAGES)), strategy))
    return plans.of(2)


def nothing() -> None:
    """Stand in for a kernel."""


def measure(plan: Plan, streams: bool) -> float:
    """Microseconds per instruction, the median of several steps."""
    index = {name: i for i, name in enumerate([*plan.residents, *plan.slots])}
    executor = Executor(
        plan, [nothing] * len(plan.instrs), [None] * len(index), index, device=2, streams=streams
    )
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        executor.run()
        times.append(time.perf_counter() - began)
    executor.close()
    return statistics.median(times) / len(plan.instrs) * 1e6


if __name__ == "__main__":
    plan = a_plan()
    names = sorted({ins.stream for ins in plan.instrs})
    print(f"{len(plan.instrs)} instructions on {len(names)} streams ({', '.join(names)})")
    print(f"in the order of issue  {measure(plan, streams=False):6.2f} us per instruction")
    print(f"a thread per stream    {measure(plan, streams=True):6.2f} us per instruction")
