"""How long simulating takes: synthetic chains up to 16,384 devices, each program once for all its devices.

Each case runs in a process of its own, so that its peak memory is its own. `its CPU` is that process's CPU
time in simulating: where the time is well above it, the machine had other work.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is found

CASES = {  # name: stages, replicas, microbatches, zero
    "PP=16 x DP=64, 64 microbatches": (16, 64, 64, 0),
    "PP=64 x DP=256, 128 microbatches": (64, 256, 128, 0),
    "PP=64 x DP=256, 256 microbatches": (64, 256, 256, 0),
    "PP=64 x DP=256, 256 microbatches, zero=3": (64, 256, 256, 3),
}
LIMIT = 30  # seconds, of the largest


def simulate_chain(stages: int, replicas: int, microbatches: int, zero: int) -> dict[str, float]:
    """Compile a chain under 1F1B, then simulate it on H100s."""
    from piper import at, replicate, schedules, split
    from piper.directives import Directive, apply
    from piper.ir.graph import start
    from piper.lower.lower import lower
    from piper.lower.validate import validate
    from piper.simulate.cluster import load_cluster
    from piper.simulate.costs import Roofline
    from piper.simulate.simulate import simulate
    from tests.chain import chain

    outline = chain(stages)
    begin = time.perf_counter()
    strategy: list[Directive] = [
        replicate(at(PP=s), range(s * replicas, (s + 1) * replicas), zero=zero) for s in range(stages)
    ]
    strategy += [split(at(), parts=microbatches), *schedules.one_f_one_b(stages, microbatches)]
    plans, _ = lower(validate(apply(start(outline), strategy)))
    compiled = time.perf_counter()
    used = time.process_time()
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    return {
        "compile": compiled - begin,
        "simulate": time.perf_counter() - compiled,
        "simulate_cpu": time.process_time() - used,
        "instructions": sum(len(plan.instrs) for plan in plans),
        "bubble": found.bubble,
        "path": len(found.path),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=4, type=int, help="internal: run one case here and print JSON")
    options = parser.parse_args()
    if options.case:
        result = simulate_chain(*options.case)
        used = resource.getrusage(resource.RUSAGE_SELF)
        result["rss_gib"], result["cpu"] = used.ru_maxrss / 2**20, used.ru_utime + used.ru_stime
        print(json.dumps(result))
        return
    headings = f"{'simulate':>9} {'its CPU':>9} {'compile':>9} {'memory':>9} {'instrs':>8} {'bubble':>7}"
    print(f"{'case':42} {headings}  bar")
    for name, case in CASES.items():
        done = subprocess.run(
            [sys.executable, __file__, "--case", *map(str, case)],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr)
        r = json.loads(done.stdout.splitlines()[-1])
        bar = f"at most {LIMIT} s" if case[:3] == (64, 256, 256) else ""
        times = f"{r['simulate']:7.2f} s {r['simulate_cpu']:7.2f} s {r['compile']:7.2f} s"
        sizes = f"{r['rss_gib']:5.2f} GiB {r['instructions']:8} {100 * r['bubble']:6.1f}%"
        print(f"{name:42} {times} {sizes}  {bar}")


if __name__ == "__main__":
    main()
