"""Published training runs, simulated as ordinary strategies: predicted next to published TFLOP/s per device.

python benchmarks/published.py [--rows MODEL,MODEL] [--full] [--tune] [--jobs N] [--out FILE]

A row names a model, its shape, its devices and how it was divided. Its model is captured with two layers,
which are then repeated: equal layers share code and cost the same. The strategy is a list of directives, the
machines are the cluster files that Piper ships. What was changed after a first look at the rows is said in
benchmarks/results/published.md.
Microbatch sizes and interleaving are those of the scripts that the authors published.

A pipeline repeats itself once it is full, so a step with many microbatches is extrapolated from two shorter
ones. `--full` simulates every microbatch.

`--tune` also searches for a strategy of each run, from the published one, so that what is found is never
slower. The space is small: up to twice the ranks, the published microbatch or smaller ones, the published
degrees of tensor and context parallelism, half of the tensor parallelism, or none. Every microbatch is
simulated here, so long steps take long. The search evaluates the published strategy first: that is the
prediction of its row.
"""

import argparse
import csv
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from lowering import lowered
from published_models import Decoder, Sizes, divided_weights, loss
from repeated import repeated
from shorter import shorter_lengths

import piper
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel
from piper.ir.graph import start
from piper.ir.select import At
from piper.schedules.grid import Grid, grid_for, orders
from piper.simulate.cluster import Cluster, load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import Simulation, simulate
from piper.tuning.choice import GIVEN, SYNTHESISED, StrategyChoice
from piper.tuning.evaluate import Evaluation
from piper.tuning.result import Tuned
from piper.tuning.space import Space
from piper.tuning.strategy_search import StrategySearch

T = TypeVar("T")
TABLE = Path(__file__).parent / "published.csv"
CLUSTERS = {"H100": "h100", "A100": "a100"}
LAYERS = 2  # that are captured
TRIALS = 3  # of a search without tensor and context parallelism, and of one with them
MOST_PASSES = 64  # ranks times microbatches of a step for which orders are synthesised
MOST_RANKS = 32  # of a pipeline that is longer than the published one
FIELDS = {"tokens": 1, "labels": 1}
# What the table does not say: samples of a microbatch and stages of a rank (Megatron-LM: its script for table
# 1; Llama 3: section 3.3.2, by which a stage is one layer, and the embedding and the head are stages too).
DETAILS = {
    "405B": (1, 8),
    "1.7B": (16, 1),
    "3.6B": (16, 1),
    "7.5B": (16, 1),
    "18.4B": (8, 1),
    "39.1B": (4, 1),
    "76.1B": (2, 3),
    "145.6B": (2, 2),
    "310.1B": (1, 2),
    "529.6B": (1, 3),
    "1008B": (1, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published run."""

    source: str
    model: str
    sizes: Sizes
    gpu: str
    tp: int
    cp: int
    pp: int
    dp: int
    global_batch: int
    recompute: bool
    published: float  # TFLOP/s of a device
    counts_recompute: bool  # whether recomputation counts as work

    @property
    def samples(self) -> int:
        """Return the samples of a microbatch."""
        return DETAILS[self.model][0]

    @property
    def stages_per_rank(self) -> int:
        return DETAILS[self.model][1]

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.dp * self.samples)

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def name(self) -> str:
        long = f", {self.sizes.seq // 1024}k tokens" if self.cp > 1 else ""
        return f"{self.model} on {self.devices} {self.gpu}{long}"

    @property
    def work(self) -> float:
        """Return the floating-point operations of a step, as the source counts them.

        Megatron-LM counts recomputation and whole attention (its equation 3). Llama 3 counts the model
        alone; attention is causal.
        """
        s, tokens = self.sizes, self.global_batch * self.sizes.seq
        if self.counts_recompute:
            part = 1 + s.seq / (6 * s.dim) + s.vocab / (16 * s.layers * s.dim)
            return 96 * tokens * s.layers * s.dim**2 * part
        keys = s.dim * s.kv_heads // s.heads
        layer = 2 * s.dim * s.dim + 2 * s.dim * keys + (3 if s.gated else 2) * s.dim * s.ffn
        attention = 6 * s.layers * s.dim * s.seq
        return tokens * (6 * (s.layers * layer + s.vocab * s.dim) + attention)


def rows_of(path: Path) -> list[Row]:
    """Read the published runs."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row_of(found) for found in csv.DictReader(file)]


def row_of(found: dict[str, str]) -> Row:
    """Read one published run."""
    number = {name: int(found[name]) for name in ("tp", "cp", "pp", "dp", "global_batch")}
    sizes = Sizes(
        layers=int(found["layers"]),
        dim=int(found["dim"]),
        ffn=int(found["ffn"]),
        gated=found["gated"] == "1",
        heads=int(found["heads"]),
        kv_heads=int(found["kv_heads"]),
        vocab=int(found["vocab"]),
        seq=int(found["seq"]),
    )
    row = Row(
        source=found["source"],
        model=found["model"],
        sizes=sizes,
        gpu=found["gpu"],
        recompute=found["recompute"] == "full",
        published=float(found["tflops_per_gpu"]),
        counts_recompute=found["counted"] == "hardware",
        **number,
    )
    assert row.devices == int(found["gpus"]), f"{row.name}: {found['gpus']} devices were published"
    return row


def captured(row: Row) -> CapturedModel:
    """Capture two layers of a model for one group of devices, and repeat the second."""
    small = replace(row.sizes, layers=LAYERS)
    tokens = torch.zeros((row.samples, row.sizes.seq), dtype=torch.long)
    job = piper.Job(
        model=lambda: Decoder(small),
        loss=loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=[*axes(row, piper.at(), range(row.tp * row.cp))] or [piper.place(piper.at(), [0])],
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        precision="bf16",
    )
    program = piper.compile(job, device="cpu", compile=True)
    return repeated(program.outline, row.sizes.layers)


def axes(row: Row, where: At, devices: Sequence[int]) -> list[Directive]:
    """Return tensor parallelism, with a divided sequence between for Llama 3, and context parallelism."""
    found: list[Directive] = []
    if row.tp > 1:
        weights = divided_weights(row.sizes)
        between = 1 if row.sizes.gated else None
        found.append(piper.shard(where, devices, ways=row.tp, axis="TP", weights=weights, between=between))
    if row.cp > 1:
        found.append(piper.shard(where, devices, ways=row.cp, axis="CP", batch=FIELDS, balance="zigzag"))
    return found


def stages_of(row: Row) -> list[range]:
    """Return the regions of each stage: the embedding is the first one, the head the last."""
    stages, layers = row.pp * row.stages_per_rank, row.sizes.layers
    if stages == layers + 2:
        return [range(region, region + 1) for region in range(stages)]
    assert layers % stages == 0, f"{row.name}: {layers} layers do not divide into {stages} stages"
    each = layers // stages
    found = [range(1 + each * stage, 1 + each * (stage + 1)) for stage in range(stages)]
    found[0] = range(found[0].start - 1, found[0].stop)
    found[-1] = range(found[-1].start, found[-1].stop + 1)
    return found


def strategy_of(row: Row, microbatches: int) -> list[Directive]:
    """Return a row's strategy: replicas, tensor and context parallelism, recomputation, a schedule."""
    stages, devices = stages_of(row), devices_of(row)
    grid = grid_of(row, microbatches)
    zero = 1 if row.sizes.gated else 0
    found: list[Directive] = []
    for number, regions in enumerate(stages):
        where = piper.at(LAYER=regions)
        own = devices[number % row.pp]
        found.append(piper.replicate(where, own, zero=zero) if len(own) > 1 else piper.place(where, own))
        found += axes(row, where, own)
    if row.recompute:
        layers = piper.at(LAYER=range(1, row.sizes.layers + 1))
        found.append(piper.remat(layers, 1.0, across="LAYER"))
    if microbatches > 1:
        found.append(piper.split(piper.at(), parts=microbatches))
    if grid is not None and microbatches > 1:
        found += orders(grid, stage=[piper.at(LAYER=regions) for regions in stages])
    return found


def devices_of(row: Row) -> list[list[int]]:
    """Return the devices of each rank of the pipeline.

    Groups of tensor and context parallelism are neighbours. Llama 3 puts the ranks of a pipeline next to each
    other, Megatron-LM the replicas.
    """
    group = row.tp * row.cp
    if row.sizes.gated:
        starts = [[(replica * row.pp + rank) * group for replica in range(row.dp)] for rank in range(row.pp)]
    else:
        starts = [[(rank * row.dp + replica) * group for replica in range(row.dp)] for rank in range(row.pp)]
    return [[first + n for first in firsts for n in range(group)] for firsts in starts]


def grid_of(row: Row, microbatches: int) -> Grid | None:
    """Return a row's schedule. None: it has one rank."""
    if row.pp == 1:
        return None
    if row.stages_per_rank > 1:
        return grid_for("interleaved-1f1b", row.pp, microbatches, row.stages_per_rank)
    return grid_for("1f1b", row.pp, microbatches)


def simulated(
    row: Row, outline: CapturedModel, cluster: Cluster, microbatches: int, *, prove: bool = False
) -> Simulation:
    """Lower a row's strategy to plans and simulate a step."""
    graph = apply(start(outline), strategy_of(row, microbatches))
    plans = lowered(graph, row.dp * row.samples * microbatches, prove=prove)
    return simulate(plans, outline, Roofline(cluster))


def step_of(row: Row, outline: CapturedModel, cluster: Cluster, *, full: bool) -> float:
    """Return the seconds of a step, extrapolated where it has many microbatches."""
    lengths = None if full else shorter_lengths(strategy_of(row, row.microbatches))
    if lengths is None:
        return simulated(row, outline, cluster, row.microbatches).step
    one, two = (simulated(row, outline, cluster, count).step for count in lengths.simulated)
    return two + lengths.beyond * (two - one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row and what was predicted of it."""

    row: Row
    step: float
    took: float  # seconds of this machine

    @property
    def predicted(self) -> float:
        """Return the TFLOP/s of a device."""
        return self.row.work / self.step / self.row.devices / 1e12

    @property
    def error(self) -> float:
        return self.predicted / self.row.published - 1

    def __str__(self) -> str:
        return (
            f"{self.row.name:32} {self.row.published:9.0f} {self.predicted:9.0f} {100 * self.error:+7.1f} % "
            f"{self.step:9.2f} s {self.took:7.1f} s"
        )


def predicted(row: Row, *, full: bool = False) -> Found:
    """Simulate one row."""
    begin = time.process_time()
    step = step_of(row, captured(row), load_cluster(CLUSTERS[row.gpu]), full=full)
    return Found(row=row, step=step, took=time.process_time() - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What `tune` would have chosen for a row."""

    found: Found  # the published strategy, as the search evaluated it first
    label: str
    step: float
    tried: int  # candidates, with the published one
    held: tuple[float, float]  # GiB of a device: published, tuned
    took: float  # seconds of this machine

    def __str__(self) -> str:
        return (
            f"{self.found.row.name:32} {self.found.step:9.2f} s {self.step:9.2f} s "
            f"{100 * (self.found.step / self.step - 1):+7.1f} % {self.tried:6} "
            f"{self.held[0]:6.0f} {self.held[1]:6.0f} GiB {self.took:7.1f} s  {self.label}"
        )


class DoesNotFitError(Exception):
    """The published strategy holds more than the cluster's devices have left for a plan."""

    def __init__(self, peak: int) -> None:
        self.peak = peak


def chosen(row: Row) -> Chosen:
    """Search for the strategy of a row, from the published one.

    Where that one holds more than a device has by our count, the search may use as much.
    """
    begin = time.process_time()
    try:
        tuned, first_took = searched(row, None)
    except DoesNotFitError as held:
        tuned, first_took = searched(row, held.peak)
    first, best = tuned.evaluated[0], tuned.best
    return Chosen(
        found=Found(row=row, step=first.step, took=first_took),
        label=label_of(best.choice),
        step=best.step,
        tried=len(tuned.evaluated),
        held=(first.needs / 2**30, best.needs / 2**30),
        took=time.process_time() - begin,
    )


def searched(row: Row, memory: int | None) -> tuple[Tuned, float]:
    """Search in a row's space. Return also the CPU time until the published strategy was evaluated."""
    begin, usable = time.process_time(), load_cluster(CLUSTERS[row.gpu]).usable(0)
    evaluated: list[float] = []
    tokens = torch.zeros((row.global_batch, row.sizes.seq), dtype=torch.long)
    job = piper.Job(
        model=lambda: Decoder(row.sizes),
        loss=loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        precision="bf16",
    )

    def noted(search: StrategySearch, found: Evaluation) -> None:
        evaluated.append(time.process_time() - begin)
        if memory is None and found.choice.schedule == GIVEN and found.needs > usable:
            raise DoesNotFitError(found.peak)

    tuned = piper.tune(
        job,
        CLUSTERS[row.gpu],
        row.devices,
        memory=memory,
        space=space_of(row),
        start=strategy_of(row, row.microbatches),
        trials=TRIALS,
        front=False,
        compile=True,
        progress=noted,
    )
    return tuned, evaluated[0]


def label_of(choice: StrategyChoice) -> str:
    """Return a strategy in a few words, without the sizes of many stages."""
    if choice.schedule == GIVEN:
        return "as published"
    sizes = " ".join(map(str, choice.sizes))
    return choice.label.replace(f", stages {sizes}", f", {len(choice.sizes)} stages")


def space_of(row: Row) -> Space:
    """Return what to choose from: the published degrees and smaller ones, and up to twice the ranks."""
    few = row.pp * row.microbatches <= MOST_PASSES
    return Space(
        ranks=tuple({1, row.pp // 4, row.pp // 2, row.pp, min(2 * row.pp, max(MOST_RANKS, row.pp))}),
        rows=tuple({1, row.samples // 4, row.samples // 2, row.samples}),
        stages_per_rank=tuple({1, row.stages_per_rank}),
        schedules=("1f1b", "interleaved-1f1b", *((SYNTHESISED,) if few else ())),
        zeros=(0, 1, 3),
        mixed=False,
        neighbours=("ranks",) if row.sizes.gated else ("replicas",),
        tensor=tuple({1, row.tp // 2, row.tp}),
        context=tuple({1, row.cp}),
        boundaries=("balanced",),
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's correlation of the ranks of pairs. Equal values share their mean rank."""
    ranks = [ranked([pair[side] for pair in pairs]) for side in (0, 1)]
    return statistics.correlation(ranks[0], ranks[1])


def ranked(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 1."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def summary(found: Sequence[Found]) -> list[str]:
    """Return the median and the largest error, and how well the order agrees within each source."""
    errors = [abs(one.error) for one in found]
    lines = [f"median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %"]
    for source in dict.fromkeys(one.row.source for one in found):
        pairs = [(one.row.published, one.predicted) for one in found if one.row.source == source]
        if len(pairs) > 2:
            lines.append(f"{source}: rank correlation {rank_correlation(pairs):.2f} over {len(pairs)} runs")
    return lines


def each(work: Callable[[Row], T], rows: Sequence[Row], jobs: int) -> Iterator[T]:
    """Yield what comes of each row, in their order."""
    if jobs == 1:
        yield from map(work, rows)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--rows", default="", help="models, such as 1.7B,405B; default: all")
    parser.add_argument("--full", action="store_true", help="simulate every microbatch")
    parser.add_argument("--tune", action="store_true", help="also search for a strategy of each run")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each in a process of its own")
    parser.add_argument("--out", type=Path, help="write the figures as JSON lines")
    options = parser.parse_args()
    wanted = set(filter(None, options.rows.split(",")))
    rows = [row for row in rows_of(options.table) if not wanted or row.model in wanted]
    found: list[Found] = []
    if options.tune:
        heading = f"{'run':32} {'published':>11} {'tuned':>11} {'faster':>9} {'tried':>6}"
        print(f"{heading} {'memory':>17} {'CPU':>9}  strategy")
        for made in each(chosen, rows, options.jobs):
            print(made, flush=True)
            found.append(made.found)
        print()
    print(f"{'run':32} {'published':>9} {'predicted':>9} {'error':>9} {'step':>11} {'CPU':>9}")
    for one in found or each(partial(predicted, full=options.full), rows, options.jobs):
        print(one, flush=True)
        found += [one] if not options.tune else []
    print(*summary(found), sep="\n")
    if options.out is not None:
        figures = [
            {"run": f.row.name, "published": f.row.published, "predicted": f.predicted, "step_s": f.step}
            for f in found
        ]
        options.out.write_text("".join(json.dumps(figure) + "\n" for figure in figures))


if __name__ == "__main__":
    main()
