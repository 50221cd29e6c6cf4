"""Context parallelism on one GPU: one rank of eight at 128k tokens, its memory, and its time on every rank.

    python benchmarks/gpu_context.py                  # an H200: about two minutes
    python benchmarks/gpu_context.py --tiny           # a small form for a CPU: figures mean nothing

A rank runs by itself (`rank:N`): real kernels on real memory, a network that is only timed. Layers have the
shape of an 8B decoder, in bf16. The first part runs several layers at full length, undivided and as one rank
of eight: the undivided one should run out of memory, the divided one fit. The second part times one layer on
every rank: under zigzag no rank should take 5 % longer than another.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import piper
from piper.compiler import Program
from piper.models import decoder
from piper.run.launch import PeakMemory, launch_single_rank

GIB = 2**30
FIELDS = {"tokens": 1, "labels": 1}
SPREAD = 0.05  # how much longer the slowest rank may take than the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is run: a layer's shape, how many layers, how long the sequence, on how many ranks."""

    layer: decoder.Config
    layers: int  # of the first part; the second has one
    length: int
    ways: int
    steps: int
    device: str


LARGE = Size(
    layer=decoder.Config(
        vocab=32_768, dim=4096, layers=1, heads=32, kv_heads=8, head_dim=128, hidden=14_336, stages=1
    ),
    layers=8,
    length=131_072,
    ways=8,
    steps=3,
    device="cuda",
)
TINY = Size(
    layer=decoder.Config.tiny(layers=1, stages=1), layers=2, length=256, ways=4, steps=2, device="cpu"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank took: the seconds of its steps after the first, and its memory."""

    seconds: tuple[float, ...]
    peak: PeakMemory
    failed: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def memory(self) -> str:
        """Return the memory as the table shows it."""
        planned = f"planned {self.peak.predicted / GIB:.2f} GiB"
        if self.failed:
            return f"{planned}: out of memory"
        return (
            planned if self.peak.measured is None else f"{planned}, used {self.peak.measured / GIB:.2f} GiB"
        )


def program_of(size: Size, layers: int, attention: str | None, balance: str | None) -> Program:
    """Compile a decoder of some layers for its group of ranks; no attention: for one device."""
    tokens = torch.randint(size.layer.vocab, (1, size.length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    config, strategy = replace(size.layer, layers=layers), list[piper.Directive]()
    if attention is not None:
        ranks = [*range(size.ways)]
        strategy.append(
            piper.shard(piper.at(), ranks, axis="CP", batch=FIELDS, attention=attention, balance=balance)
        )
    job = piper.Job(
        model=lambda: decoder.Decoder(config),
        loss=decoder.token_loss,
        data=lambda: [batch],
        strategy=strategy,
        optimizer=sgd,
        precision="bf16",
    )
    return piper.compile(job, device=size.device)


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer without state, so that memory is that of activations."""
    return torch.optim.SGD(params, lr=1e-4)


def clean(device: str) -> None:
    """Give back what earlier runs held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rank_of(program: Program, rank: int, size: Size, steps: int) -> Outcome:
    """Run one rank: a step to warm up, then some that are timed."""
    batch = next(iter(program.job.data()))
    clean(size.device)
    with launch_single_rank(program, f"rank:{rank}") as run:
        try:
            for _ in range(steps + 1):
                run.step(batch)
        except torch.OutOfMemoryError:
            return Outcome(seconds=(), peak=run.peak(), failed=True)
        return Outcome(seconds=tuple(run.seconds[1:]), peak=run.peak())


def show(what: str, got: str, bar: str = "", holds: bool | None = None) -> bool:
    """Print a line of the table, and return whether it holds."""
    verdict = {True: "holds", False: "short", None: ""}[holds]
    print(f"{what:<52} {got:<64} {bar:<24} {verdict}".rstrip(), flush=True)
    return holds is not False


def memory(size: Size, kinds: Sequence[str]) -> bool:
    """Show the memory of several layers at full length, undivided and divided."""
    where = f"{size.layers} layers, {size.length:,} tokens"
    real = size.device == "cuda"
    whole = rank_of(program_of(size, size.layers, None, None), 0, size, 0)
    fine = show(f"{where}: undivided", whole.memory(), "does not fit", whole.failed if real else None)
    for kind in kinds:
        one = rank_of(program_of(size, size.layers, kind, "zigzag"), 0, size, 1)
        ratio = f"{one.peak.predicted / whole.peak.predicted:.2f} of undivided"
        took = "" if one.failed else f"; {one.median:.2f} s a step"
        what = f"{where}: rank 0 of {size.ways}, {kind}, zigzag"
        fine &= show(what, f"{one.memory()}, {ratio}{took}", "fits", not one.failed if real else None)
    return fine


def balance(size: Size, kinds: Sequence[str]) -> bool:
    """Show the time of one layer on every rank."""
    fine = True
    for kind, balanced in (*((kind, "zigzag") for kind in kinds), *((kind, None) for kind in kinds[:1])):
        program = program_of(size, 1, kind, balanced)
        ranks = range(size.ways) if balanced else (0, size.ways - 1)
        times = [rank_of(program, rank, size, size.steps).median for rank in ranks]
        apart = max(times) / min(times) - 1
        shown = " ".join(f"{seconds * 1e3:.0f}" for seconds in times)
        which = "every rank" if balanced else "first and last rank"
        judged = balanced is not None and size.device == "cuda"
        fine &= show(
            f"one layer, {kind}, {balanced or 'not balanced'}: {which}",
            f"{shown} ms: {apart:.1%} apart",
            f"at most {SPREAD:.0%} apart" if balanced else "",
            apart <= SPREAD if judged else None,
        )
    return fine


def main() -> None:
    """Run both parts; exit with 1 where one falls short."""
    parser = argparse.ArgumentParser(description="Context parallelism, one rank at a time.")
    parser.add_argument("--tiny", action="store_true", help="a small form, on the CPU")
    parser.add_argument("--kinds", default="gather,ring", help="ways to attend: gather, ring, heads")
    parser.add_argument("--part", choices=("memory", "balance"), help="only this part")
    asked = parser.parse_args()
    size, kinds = TINY if asked.tiny else LARGE, asked.kinds.split(",")
    name = torch.cuda.get_device_name() if size.device == "cuda" else platform.machine()
    print(f"{name}, torch {torch.__version__}", flush=True)
    begin = time.perf_counter()
    parts = {"memory": memory, "balance": balance}
    results = [run(size, kinds) for part, run in parts.items() if asked.part in (None, part)]
    print(f"{time.perf_counter() - begin:.0f} s in all")
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
