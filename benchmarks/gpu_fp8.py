"""Products in fp8 beside our own bf16, on one GPU with fp8: step time, memory, and the curve of a training.

Both sides of a row live in one process and take turns; figures are medians. The ranks are those of `gpu.py`:
PP8 x DP4 at zero=3, 36 layers of width 4096, 16 microbatches, on arrivals that are random.

python benchmarks/gpu_fp8.py [--rows single,ranks,curve] [--stages 4] [--sizes 8] [--steps 300] [--gather]
"""

import argparse
import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from gpu import (
    DENSE,
    GIB,
    LARGE,
    Batch,
    Choices,
    Line,
    Side,
    Step,
    attempt,
    batch_of,
    built,
    clean,
    fused_adamw,
    job_of,
    pipeline_strategy,
    piper_step,
    take_turns,
)
from torch import Tensor

import piper
from piper.models import decoder
from piper.run.launch import launch_single_rank

BARS = {"single": 1.2, "ranks": 1.35}  # of the throughput in bf16, at least
CURVE = 0.005  # of the final loss, at most
LAST = 20  # steps whose mean is the final loss
SMALL = decoder.Config(
    vocab=512, dim=512, layers=6, heads=8, kv_heads=8, head_dim=64, hidden=1536, qk_norm=True
)
LOCAL = replace(SMALL, dim=64, layers=2, heads=4, kv_heads=4, head_dim=16, hidden=128)  # to try it on a CPU
NARROW = piper.precision(piper.at(), "fp8")


def judged(what: str, bf16: Side, fp8: Side, peaks: dict[str, int], bar: float) -> Line:
    """Compare two sides."""
    ratio = bf16.median / fp8.median
    return Line(
        what=what,
        got=f"fp8 {fp8.median * 1e3:.1f} ms {peaks['fp8'] / GIB:.1f} GiB, "
        f"bf16 {bf16.median * 1e3:.1f} ms {peaks['bf16'] / GIB:.1f} GiB: {ratio:.3f}x",
        bar=f"at least {bar}x",
        holds=ratio >= bar,
    )


def single(cache: str) -> Iterator[Line]:
    """One device, 0.94B, batch 4 x 2048, all layers in fp8."""
    clean()
    batch = batch_of(DENSE, 4, 2048)
    with ExitStack() as stack:
        sides = [
            built(name, lambda found=found: piper_step(stack, job_of(DENSE, batch, found), batch, cache))
            for name, found in (("bf16", []), ("fp8", [NARROW]))
        ]
        peaks = take_turns(sides, 4, 4)
        yield judged("single device, 0.94B, 4 x 2048", *sides, peaks, BARS["single"])
        yield Line(
            what="to the first step's end", got=", ".join(f"{s.name} {s.build_s:.1f} s" for s in sides)
        )


def rank_side(
    stack: ExitStack, strategy: Sequence[piper.Directive], batch: Batch, rank: int, cache: str
) -> Step:
    """Build one rank of the job."""
    job = job_of(replace(LARGE, by_layer=True), batch, strategy)
    program = piper.compile(job, device="cuda", compile=True, cache=cache)
    run = stack.enter_context(launch_single_rank(program, f"rank:{rank}"))
    print(f"rank {rank}: sends {gathered(program, rank) / 2**20:.0f} MiB to gather parameters in a step")
    return lambda: run.step(batch)


def gathered(program: piper.compiler.Program, rank: int) -> int:
    """Return the bytes that a rank sends to gather parameters in one step, as its plan says."""
    plan = next(plan for plan in program.plans if rank in plan.devices)
    return sum(ins.nbytes for ins in plan.instrs if ins.op == "gather")


def both(stage: int, size: int, cache: str, gather: bool) -> Line:
    """Measure a rank in bf16 and in fp8, in turns."""
    narrow = piper.precision(piper.at(), "fp8", gather="fp8") if gather else NARROW
    clean()
    batch = batch_of(LARGE, 4 * 16 * size, 1024)
    strategy = pipeline_strategy(3, 16, Choices())
    with ExitStack() as stack:
        make = functools.partial(rank_side, stack, batch=batch, rank=4 * stage, cache=cache)
        sides = [
            built("bf16", lambda: make(strategy)),
            built("fp8", lambda: make([*strategy, narrow])),
        ]
        peaks = take_turns(sides, 4, 2)
        what = f"stage {stage} of PP8 x DP4, {size} x 1024, zero=3{', gathered in fp8' if gather else ''}"
        return judged(what, *sides, peaks, BARS["ranks"])


def ranks(cache: str, stages: Sequence[int], sizes: Sequence[int], gather: bool) -> Iterator[Line]:
    """Ranks of the 8B model, by stage and samples of a microbatch."""
    for size in sizes:
        for stage in stages:
            found = attempt(functools.partial(both, stage, size, cache, gather))
            yield found if isinstance(found, Line) else Line(what=f"stage {stage}, {size} x 1024", got=found)


def chain_batches(config: decoder.Config, samples: int, length: int, steps: int) -> list[Batch]:
    """Draw texts of a random chain: each token is followed by one of four, which takes a while to learn."""
    draw = torch.Generator().manual_seed(0)
    follow = torch.randint(config.vocab, (config.vocab, 4), generator=draw)
    batches = []
    for _ in range(steps):
        rows = [torch.randint(config.vocab, (samples,), generator=draw)]
        for _ in range(length):
            rows.append(follow[rows[-1], torch.randint(4, (samples,), generator=draw)])
        tokens = torch.stack(rows, 1)
        batches.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return batches


def losses(
    config: decoder.Config, batches: list[Batch], strategy: Sequence[piper.Directive], cache: str
) -> list[float]:
    """Train from the same start on the same batches, and return every loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        return fused_adamw(params) if device == "cuda" else torch.optim.AdamW(params, lr=1e-3)

    job = replace(job_of(config, batches[0], strategy), data=lambda: batches, optimizer=optimizer)
    program = piper.compile(job, device=device, compile=device == "cuda", cache=cache)
    with piper.launch(program, on="inline") as run:
        return [run.step(batch).loss for batch in batches]


def curve(cache: str, steps: int, config: decoder.Config) -> Iterator[Line]:
    """The same training in bf16 and in fp8."""
    batches = chain_batches(config, 16, 256 if config is SMALL else 32, steps)
    found = {name: losses(config, batches, s, cache) for name, s in (("bf16", []), ("fp8", [NARROW]))}
    for name, each in found.items():
        points = [each[min(i, steps - 1)] for i in range(0, steps + 1, max(1, steps // 6))]
        yield Line(what=f"curve, {steps} steps: {name}", got=" ".join(f"{loss:.3f}" for loss in points))
    last = {name: statistics.fmean(each[-LAST:]) for name, each in found.items()}
    off = last["fp8"] / last["bf16"] - 1
    yield Line(
        what=f"curve: the mean of the last {LAST} losses",
        got=f"fp8 {last['fp8']:.4f}, bf16 {last['bf16']:.4f}: {100 * off:+.2f} %; at best {math.log(4):.4f}",
        bar=f"within {100 * CURVE:.1f} %",
        holds=abs(off) <= CURVE,
    )


def main() -> None:
    """Print the rows that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="single,ranks,curve")
    parser.add_argument("--stages", default="4")
    parser.add_argument("--sizes", default="8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gather", action="store_true", help="gather weights in fp8 on the ranks")
    parser.add_argument("--small", action="store_true", help="a tiny model for the curve, to try it on a CPU")
    asked = parser.parse_args()
    numbers = {name: [int(each) for each in getattr(asked, name).split(",")] for name in ("stages", "sizes")}
    with tempfile.TemporaryDirectory() as cache:
        rows: dict[str, Callable[[], Iterator[Line]]] = {
            "single": lambda: single(cache),
            "ranks": lambda: ranks(cache, gather=asked.gather, **numbers),
            "curve": lambda: curve(cache, asked.steps, LOCAL if asked.small else SMALL),
        }
        for name in asked.rows.split(","):
            for line in rows[name]():
                print(line, flush=True)


if __name__ == "__main__":
    main()
