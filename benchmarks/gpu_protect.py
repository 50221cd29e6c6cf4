"""What copies of the state cost on one GPU: steps without copies and with `protect`, in turns.

The 0.94B model of `gpu.py` on one device, with masters and both moments in float32. A copy of them goes to
shared memory of the host in every step, while the step runs.

python benchmarks/gpu_protect.py [--parts 16] [--rounds 8] [--commit HASH] [--out FILE]
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from gpu import DENSE, GIB, Batch, Line, Step, batch_of, built, heading, job_of, take_turns

import piper
from piper.run.launch import launch_inline
from piper.run.run import Run
from piper.runtime.worker import Options
from piper.workers.transport.versions import Versions

LIMIT = 0.01  # of a step


def step_of(stack: ExitStack, batch: Batch, parts: int, cache: str, *, protected: bool) -> tuple[Run, Step]:
    """Build a run, and return its step."""
    strategy = [piper.split(piper.at(), axis="MB", parts=parts), *([piper.protect(piper.at())] * protected)]
    program = piper.compile(job_of(DENSE, batch, strategy), device="cuda", compile=True, cache=cache)
    versions = Versions(program.plans)
    stack.callback(versions.close)
    run = launch_inline(program, Options(), versions.files if protected else None)
    stack.callback(run.close)
    run.session.protect()
    return run, lambda: run.step(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=16, help="microbatches of 4 x 2048 tokens (16)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "piper-bench-cache"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    batch = batch_of(DENSE, 4 * asked.parts, 2048)
    runs: dict[str, Run] = {}
    with ExitStack() as stack:

        def make(name: str) -> Step:
            runs[name], step = step_of(stack, batch, asked.parts, asked.cache, protected=name == "protect")
            return step

        plain, kept = (built(name, lambda name=name: make(name)) for name in ("plain", "protect"))  # type: ignore[misc]
        take_turns([plain, kept], asked.rounds, 2)
        versions = runs["protect"].versions[0]
        assert not versions.refused, "nothing was copied"
        total = sum(
            max(map(len, writer.memories.values()), default=0) for writer in versions.writers.values()
        )
        cost = kept.median / plain.median - 1
        line = Line(
            what=f"protect(at()), one device, {asked.parts} x 4 x 2048",
            got=f"{kept.median * 1e3:.1f} ms, without {plain.median * 1e3:.1f} ms: {100 * cost:+.2f} %; "
            f"{total / GIB:.2f} GiB copied",
            bar=f"at most {100 * LIMIT:.0f} %",
            holds=cost <= LIMIT,
        )
    text = heading("python benchmarks/gpu_protect.py", asked.commit) + f"\n{line}\n"
    print(text, end="")
    if asked.out:
        Path(asked.out).write_text(text)


if __name__ == "__main__":
    main()
