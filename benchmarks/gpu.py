"""Piper beside torch on one GPU: throughput, memory, overlap, host time, the first step with a warm cache.

Both sides of a row live in one process and take turns, so what else the machine does hits both; figures are
medians.
Select rows with --rows. A row that cannot be had on this machine says why.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from gpu_overlap import measure as measure_overlap
from gpu_peer import LARGE, fused_adamw, master_step, peer_rank
from torch import Tensor

import piper
from piper.models import decoder
from piper.run.launch import SingleRankRun, launch_single_rank
from piper.runtime.worker import Options

DENSE = decoder.Config(
    vocab=32_768, dim=2048, layers=16, heads=16, kv_heads=8, head_dim=128, hidden=6144, qk_norm=True
)
GIB = 2**30
TIMES = {1: 0.65, 4: 0.97, 8: 0.97}  # of the peer's step at most, by samples of a microbatch, at zero=3
MEMORY = 0.80  # of the peer's peak at most
SIZES = (24, 64)  # samples of a microbatch, from which the largest that fits is worked out
Step = Callable[[], object]
Result = TypeVar("Result")
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table."""

    what: str
    got: str
    bar: str = ""
    holds: bool | None = None

    def __str__(self) -> str:
        verdict = {True: "holds", False: "short", None: ""}[self.holds]
        return f"{self.what:<58} {self.got:<58} {self.bar:<22} {verdict}".rstrip()


@dataclass(slots=True, kw_only=True)
class Side:
    """One side of a comparison: a step, what it took to build, and what it measured."""

    name: str
    step: Step
    others: int  # bytes that were there before it: not its own
    build_s: float
    times: list[float] = field(default_factory=list)
    peak: int = 0

    def run(self, count: int) -> None:
        """Run some steps, one after another, timing each."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(count):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            self.times.append(time.perf_counter() - begin)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def built(name: str, make: Callable[[], Step]) -> Side:
    """Build a side, and run its first step: compilers work then."""
    gc.collect()
    others, begin = torch.cuda.memory_allocated(), time.perf_counter()
    step = make()
    step()
    torch.cuda.synchronize()
    return Side(name=name, step=step, others=others, build_s=time.perf_counter() - begin)


def take_turns(sides: Sequence[Side], rounds: int, steps: int) -> dict[str, int]:
    """Run the sides alternately; returns what each holds at its peak, with what it keeps between steps."""
    gc.collect()
    residents = [*(side.others for side in sides[1:]), torch.cuda.memory_allocated()]
    for side in sides:
        side.run(2)
        side.times.clear()
    for _ in range(rounds):
        for side in sides:
            side.run(steps)
    return {side.name: side.peak + after - side.others for side, after in zip(sides, residents, strict=True)}


def batch_of(config: decoder.Config, samples: int, length: int) -> Batch:
    """Random tokens on the host."""
    tokens = torch.randint(config.vocab, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def job_of(config: decoder.Config, batch: Batch, strategy: Sequence[piper.Directive]) -> piper.Job:
    return piper.Job(
        model=lambda: decoder.Decoder(config),
        loss=decoder.token_loss,
        data=lambda: [batch],
        strategy=strategy,
        optimizer=fused_adamw,
        precision="bf16",
    )


def piper_step(stack: ExitStack, job: piper.Job, batch: Batch, cache: str, *, graphs: bool = False) -> Step:
    """Piper's side: the job compiled and launched."""
    program = piper.compile(job, device="cuda", compile=True, cache=cache)
    run = stack.enter_context(piper.launch(program, on="inline", graphs=graphs))
    return lambda: run.step(batch)


def torch_step(config: decoder.Config, batch: Batch, parts: int) -> Step:
    """The peer: forward and loss under `torch.compile`, accumulated gradients, float32 masters as here."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = decoder.Decoder(config)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model = model.bfloat16()
    apply_step = master_step(list(model.parameters()), masters, microbatches=parts)
    loss = torch.compile(lambda tokens, labels: decoder.loss(model, {"tokens": tokens, "labels": labels}))
    pieces = [
        {key: value.cuda() for key, value in zip(batch, values, strict=True)}
        for values in zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    ]

    def step() -> None:
        for piece in pieces:
            (loss(**piece) / parts).backward()
        apply_step()

    return step


def compare(
    what: str, piper_side: Callable[..., Step], peer: Callable[[], Step], tokens: int, rounds: int = 4
) -> Iterator[Line]:
    """Throughput and memory of both sides; ours also as one CUDA graph a step."""
    with ExitStack() as stack:
        sides = [
            built("piper", lambda: piper_side(stack)),
            built("graphs", lambda: piper_side(stack, graphs=True)),
            built("torch.compile", peer),
        ]
        peaks = take_turns(sides, rounds, 4)
        ours, graphs, theirs = sides
        ratio, memory = theirs.median / ours.median, peaks["piper"] / peaks["torch.compile"]
        yield Line(
            what=f"{what}: throughput",
            got=f"{ours.median * 1e3:.1f} ms, peer {theirs.median * 1e3:.1f} ms: {ratio:.3f}x",
            bar="at least 1.00x",
            holds=ratio >= 1.0,
        )
        yield Line(
            what=f"{what}: memory",
            got=f"{peaks['piper'] / GIB:.2f} GiB, peer {peaks['torch.compile'] / GIB:.2f} GiB: {memory:.3f}x",
            bar="at most 1.02x" if "single" in what else "",
            holds=memory <= 1.02 if "single" in what else None,
        )
        yield Line(
            what=f"{what}: as one graph a step",
            got=f"{graphs.median * 1e3:.1f} ms: {theirs.median / graphs.median:.3f}x; "
            f"{peaks['graphs'] / GIB:.2f} GiB",
        )
        yield Line(
            what=f"{what}: to the first step's end",
            got=f"{ours.build_s:.1f} s, peer {theirs.build_s:.1f} s; {tokens / ours.median:,.0f} tokens/s",
        )


def single(cache: str) -> Iterator[Line]:
    """One device, batch 4 x 2048."""
    batch = batch_of(DENSE, 4, 2048)
    yield from compare(
        "single device, 0.94B",
        lambda stack, **options: piper_step(stack, job_of(DENSE, batch, []), batch, cache, **options),
        lambda: torch_step(DENSE, batch, 1),
        4 * 2048,
    )


def zero_bubble(cache: str) -> Iterator[Line]:
    """Eight regions, eight microbatches, in zero-bubble order on one device."""
    config, batch = replace(DENSE, stages=8), batch_of(DENSE, 8, 2048)
    strategy = [
        piper.place(piper.at(), [0]),
        piper.split(piper.at(), axis="MB", parts=8),
        *piper.schedules.zero_bubble(stages=8, microbatches=8),
    ]
    yield from compare(
        "8 regions, 8 microbatches, zero-bubble",
        lambda stack, **options: piper_step(stack, job_of(config, batch, strategy), batch, cache, **options),
        lambda: torch_step(DENSE, batch, 8),
        8 * 2048,
        rounds=3,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What Piper's strategy says beyond the level of ZeRO."""

    budget: float | None = None  # of recomputation
    across: str | None = None  # the regions that keep only what comes in
    table: int | None = None  # the embedding's level of ZeRO, where it is not that of the layers
    graphs: bool = False  # a step is issued as one CUDA graph

    def __str__(self) -> str:
        if self.graphs:
            return "as one graph a step"
        said = [] if self.budget is None else [f"remat {self.budget:g}"]
        said += [] if self.across is None else [f"across {self.across}"]
        return ", ".join([*said, *([] if self.table is None else [f"embedding zero={self.table}"])])


def pipeline_strategy(zero: int, parts: int, choices: Choices) -> list[piper.Directive]:
    """PP8 x DP4, 1F1B."""
    places = [
        piper.replicate(piper.at(PP=stage), devices=[*range(4 * stage, 4 * stage + 4)], zero=zero)
        for stage in range(8)
    ]
    if choices.table is not None:
        places.append(piper.replicate(piper.at(PP=0, LAYER=None), devices=[*range(4)], zero=choices.table))
    budget = choices.budget
    recompute = [] if budget is None else [piper.remat(piper.at(), budget, across=choices.across)]
    return [
        *places,
        *recompute,
        piper.split(piper.at(), axis="MB", parts=parts),
        *piper.schedules.one_f_one_b(stages=8, microbatches=parts),
    ]


def steady(times: Sequence[float]) -> float:
    """The median of steps, but for those that warm up."""
    return statistics.median(times[min(2, len(times) - 1) :])


def timed(step: Step, steps: int) -> tuple[float, int]:
    """Seconds of a step, and the bytes that a second one would hold beyond the first, where there is but one.

    An optimizer makes its state at the end of the first step, so the next ones hold that from their start.
    """
    times, before, grown = list[float](), torch.cuda.memory_allocated(), 0
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        if steps == 1:
            grown = torch.cuda.memory_allocated() - before
    return steady(times), grown


def piper_rank(
    stack: ExitStack, rank: int, size: int, zero: int, parts: int, cache: str, choices: Choices
) -> tuple[SingleRankRun, Step]:
    """Build one rank of the same job under Piper."""
    batch = batch_of(LARGE, 4 * parts * size, 1024)
    strategy = pipeline_strategy(zero, parts, choices)
    # The peer shards block by block; so do we.
    program = piper.compile(
        job_of(replace(LARGE, by_layer=True), batch, strategy), device="cuda", compile=True, cache=cache
    )
    run = stack.enter_context(launch_single_rank(program, f"rank:{rank}", Options(graphs=choices.graphs)))
    return run, lambda: run.step(batch)


def network_bytes(run: SingleRankRun) -> int:
    """Return the bytes that stand for the network: no rank of a real job holds them."""
    return run.engine.nbytes if run.engine is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of one rank."""

    seconds: float
    peak: int
    predicted: int = 0
    without_network: float = 0.0  # seconds of a step if the network took no time

    def __str__(self) -> str:
        return f"{self.seconds * 1e3:.0f} ms {self.peak / GIB:.1f} GiB"


def both_ranks(
    stage: int, size: int, zero: int, cache: str, tuned: Sequence[Choices], rounds: int
) -> dict[str, Found]:
    """Measure a rank of both sides in turns; `tuned`: further sides, of other choices."""
    clean()
    with ExitStack() as stack:
        make_peer, network = stack.enter_context(peer_rank(stage, size, zero, 16))
        sides, runs = [built("peer", make_peer)], dict[str, SingleRankRun]()
        for choices in (Choices(), *tuned):

            def make(choices: Choices = choices) -> Step:
                runs[str(choices)], step = piper_rank(stack, 4 * stage, size, zero, 16, cache, choices)
                return step

            sides.append(built(str(choices), make))
        peaks = take_turns(sides, rounds, 2)
        seconds = {side.name: side.median for side in sides}
        engines = {"peer": network.engine} | {name: run.engine for name, run in runs.items()}
        for engine in engines.values():
            assert engine is not None
            engine.rates = dict.fromkeys(engine.rates, 0.0)
        free = [side for side in sides if side.name != str(Choices(graphs=True))]  # a graph has its copies
        take_turns(free, rounds, 2)
        return {
            side.name: Found(
                seconds=seconds[side.name],
                # The peer's engine was there before it; ours comes with the run, and no rank of a job has it.
                peak=peaks[side.name] - (network_bytes(runs[side.name]) if side.name in runs else 0),
                predicted=runs[side.name].peak().predicted if side.name in runs else 0,
                without_network=side.median if side in free else 0.0,
            )
            for side in sides
        }


def ranks(
    cache: str,
    stages: Sequence[int],
    sizes: Sequence[int],
    zeros: Sequence[int],
    tuned: Sequence[Choices] = (),
    rounds: int = 4,
) -> Iterator[Line]:
    """One rank of PP8 x DP4, 36 layers, 16 microbatches, beside torch's PipelineStage and FSDP2."""
    for zero, size, stage in itertools.product(zeros, sizes, stages):
        where = f"stage {stage} of PP8 x DP4, {size} x 1024, zero={zero}"
        found = attempt(functools.partial(both_ranks, stage, size, zero, cache, tuned, rounds))
        if isinstance(found, str):
            yield Line(what=where, got=found)
            continue
        peer = found.pop("peer")
        for choices, ours in found.items():
            what = f"{where}, {choices}" if choices else where
            seconds, memory = ours.seconds / peer.seconds, ours.peak / peer.peak
            if choices == str(Choices(graphs=True)):  # its memory is the graph's: no allocator counts it
                got = f"{ours.seconds * 1e3:.0f} ms, peer {peer.seconds * 1e3:.0f} ms: {seconds:.2f}x time"
                yield Line(what=what, got=got)
                continue
            bar = TIMES.get(size) if zero == 3 and not choices else None
            yield Line(
                what=what,
                got=f"{ours}, peer {peer}: {seconds:.2f}x time, {memory:.2f}x memory",
                bar=f"{bar}x time, {MEMORY}x memory" if bar else "",
                holds=seconds <= bar and memory <= MEMORY if bar else None,
            )
            alone = (ours.without_network * 1e3, peer.without_network * 1e3)
            yield Line(
                what=f"{what}: if networks took no time",
                got=f"{alone[0]:.0f} ms, peer {alone[1]:.0f} ms: {alone[0] / alone[1]:.2f}x time",
            )
            off = ours.predicted / ours.peak - 1
            yield Line(
                what=f"{what}: predicted peak",
                got=f"{ours.predicted / GIB:.2f} GiB of {ours.peak / GIB:.2f} GiB: {100 * off:+.1f} %",
                bar="within 5 %",
                holds=abs(off) <= 0.05,
            )


def clean() -> None:
    """Free what earlier rows have left."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peer_once(size: int) -> Found:
    """Run one step of the peer's first stage, its blocks recomputed."""
    clean()
    others = torch.cuda.memory_allocated()
    with peer_rank(0, size, 3, 16, recompute=True) as (make, network):
        others += network.engine.nbytes
        seconds, grown = timed(make(), 1)
        return Found(seconds=seconds, peak=torch.cuda.max_memory_allocated() + grown - others)


def piper_once(size: int, cache: str) -> Found:
    """Run one step of our first stage, which keeps only its inputs."""
    clean()
    others = torch.cuda.memory_allocated()
    everything = Choices(budget=0.0, across="PP", table=2)
    with ExitStack() as stack:
        run, step = piper_rank(stack, 0, size, 3, 16, cache, everything)
        seconds, grown = timed(step, 1)
        held = run.peak()
        assert held.measured is not None
        return Found(seconds=seconds, peak=held.measured + grown - others, predicted=held.predicted)


def fits(cache: str) -> Iterator[Line]:
    """The largest microbatch of stage 0 that fits, with recomputation on both sides.

    Memory grows evenly with the microbatch: two sizes say where a limit lies, and a run just below proves it.
    """
    sides: dict[str, Callable[[int], Found]] = {
        "piper": functools.partial(piper_once, cache=cache),
        "peer": peer_once,
    }
    largest: dict[str, dict[int, int]] = {name: {} for name in sides}
    for name, work in sides.items():
        found = {size: attempt(functools.partial(work, size)) for size in SIZES}
        measured = [result.peak for result in found.values() if isinstance(result, Found)]
        if len(measured) < len(SIZES):
            yield Line(what=f"stage 0, zero=3, recomputed: {name}", got=", ".join(map(str, found.values())))
            return
        low, high = measured
        slope = (high - low) / (SIZES[1] - SIZES[0])
        for limit in (40, 80):
            size = int(0.99 * ((limit * GIB - low) / slope + SIZES[0]))
            proof = attempt(functools.partial(work, size))
            while isinstance(proof, str) or proof.peak > limit * GIB:
                size = int(0.97 * size)
                proof = attempt(functools.partial(work, size))
            largest[name][limit] = size
            yield Line(
                what=f"stage 0, zero=3, {size} x 1024, recomputed: {name}",
                got=f"{proof}; {slope / 2**20:.0f} MiB for each sample"
                + (f"; predicted {proof.predicted / GIB:.1f} GiB" if proof.predicted else ""),
            )
    for limit in (40, 80):
        ours, theirs = largest["piper"][limit], largest["peer"][limit]
        yield Line(
            what=f"largest microbatch in {limit} GiB",
            got=f"{ours}, peer {theirs}: {ours / theirs:.2f}x",
            bar="at least 2x",
            holds=ours >= 2 * theirs,
        )


def attempt(work: Callable[[], Result]) -> Result | str:
    """Return what some work gives, or why it cannot be had."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # noqa: BLE001  a row that fails is a line of the table, not the end of it
        traceback.print_exc(limit=-6)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def overlap(cache: str) -> Iterator[Line]:
    """Expert exchanges behind compute, by `gpu_overlap.py`: DualPipe-V with and without streams."""
    found = measure_overlap(cache=cache)
    what, main, whole = "DualPipe-V, experts", found.main, found.whole
    yield Line(
        what=f"{what}: exposed in the main phase",
        got=f"{main.exposed * 1e3:.2f} of {main.communication * 1e3:.1f} ms: {100 * main.share:.1f} %",
        bar="at most 10 %",
        holds=main.share <= 0.1,
    )
    yield Line(
        what=f"{what}: throughput of a step",
        got=f"{found.overlapped * 1e3:.1f} ms, one by one {found.serial * 1e3:.1f} ms: {found.gain:.2f}x",
        bar="at least 1.25x",
        holds=found.gain >= 1.25,
    )
    alone = found.serial_main * 1e3
    yield Line(
        what=f"{what}: main phase",
        got=f"{main.seconds * 1e3:.1f} ms, one by one {alone:.1f} ms: {found.main_gain:.2f}x",
    )
    yield Line(
        what=f"{what}: exposed in the step",
        got=f"{whole.exposed * 1e3:.2f} of {whole.communication * 1e3:.1f} ms: {100 * whole.share:.1f} %",
    )
    at = f"{found.bandwidth / 1e9:.0f} GB/s"
    yield Line(
        what=f"{what}: exchanges beside compute",
        got=f"{found.ratio:.2f} of it, at {at}; first step after {found.build:.0f} s",
    )


def host(cache: str) -> Iterator[Line]:
    """What the host takes for an instruction, and how long the GPU waits for it, by `gpu_host.py`."""
    script = Path(__file__).with_name("gpu_host.py")
    done = subprocess.run(
        [sys.executable, str(script), "--compile"], capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode:
        yield Line(what="host time for an instruction", got=done.stderr.strip()[-200:])
        return
    yield Line(what="host time for an instruction", got="as gpu_host.py says:", bar="at most 20 us, 2 % idle")
    for text in done.stdout.splitlines():
        yield Line(what="", got=text)


def warm_cache(cache: str) -> Iterator[Line]:
    """A new process whose compiled chunks are on disk: from the job to the end of its first step."""
    got = []
    for _ in range(2):  # the first fills the cache, unless another row has
        done = subprocess.run(
            [sys.executable, __file__, "--first-step", "--cache", cache],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        if done.returncode:
            yield Line(what="first step after a warm cache", got=done.stderr.strip()[-200:])
            return
        got.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = got
    total = warm["compile"] + warm["launch"] + warm["step"]
    yield Line(
        what="first step after a warm cache",
        got=f"{total:.1f} s: " + ", ".join(f"{key} {value:.1f}" for key, value in warm.items()),
        bar="at most 10 s",
        holds=total <= 10,
    )
    yield Line(what="the same before", got=", ".join(f"{key} {value:.1f}" for key, value in cold.items()))


def first_step(cache: str) -> None:
    """Print how long a process takes to its first step."""
    batch = batch_of(DENSE, 4, 2048)
    job = job_of(DENSE, batch, [])
    marks = [time.perf_counter()]
    program = piper.compile(job, device="cuda", compile=True, cache=cache)
    marks.append(time.perf_counter())
    with piper.launch(program, on="inline") as run:
        marks.append(time.perf_counter())
        run.step(batch)
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    spans = [after - before for before, after in itertools.pairwise(marks)]
    print(json.dumps(dict(zip(("compile", "launch", "step"), spans, strict=True))))


ROWS: dict[str, Callable[[str], Iterator[Line]]] = {
    "single": single,
    "zb": zero_bubble,
    "rank": functools.partial(
        ranks,
        stages=(0, 4),
        sizes=(1,),
        zeros=(3,),
        tuned=(Choices(budget=0.25, table=2),),
        rounds=3,
    ),
    "zeros": functools.partial(ranks, stages=(0, 4), sizes=(1,), zeros=(0, 1, 2), rounds=2),
    "rank4": functools.partial(ranks, stages=(0, 4), sizes=(4, 8), zeros=(3,), rounds=2),
    "fit": fits,
    "overlap": overlap,
    "host": host,
    "cache": warm_cache,
}


def heading(command: str, commit: str) -> str:
    """What was run, of which commit, on which machine."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        here = found.stdout.strip()
    except OSError:
        here = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"command: {command}\ncommit:  {commit or here or 'unknown'}\nmachine: {gpu}; {versions}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="single,zb,rank,overlap,host,cache")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "gpu.txt"))
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "piper-bench-cache"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.first_step:
        first_step(asked.cache)
        return
    unknown = [row for row in asked.rows.split(",") if row not in ROWS]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; rows are {', '.join(ROWS)}")
    text = heading(f"python benchmarks/gpu.py --rows {asked.rows}", asked.commit) + "\n"
    print(text, end="", flush=True)
    for row in asked.rows.split(","):
        begin, lines = time.perf_counter(), list[Line]()
        if not torch.cuda.is_available():
            lines = [Line(what=row, got="not reachable: there is no CUDA device here")]
        else:
            try:
                for line in ROWS[row](asked.cache):
                    print(line, flush=True)
                    lines.append(line)
            except Exception as error:  # noqa: BLE001  the other rows are still wanted
                traceback.print_exc(limit=-8)
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                lines.append(Line(what=row, got=f"not reachable: {why}"))
        text += "\n".join(map(str, lines)) + f"\n  ({row}: {time.perf_counter() - begin:.0f} s)\n"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        Path(asked.out).write_text(text)


if __name__ == "__main__":
    main()
