"""The results of the published system in its own form: schedules, streams, memory, scale and buckets.

python benchmarks/paper.py [--parts schedules,sweep,streams,batch,peer,scale,buckets] [--out FILE]
python benchmarks/paper.py --measure FILE             # on one GPU: the costs of the 1B model's chunks
python benchmarks/paper.py --parts measured --costs FILE [--out FILE]

Every row is a job that is captured, compiled and proven as any other; its step is then simulated. Computing
costs what a roofline says, or what one GPU took for each chunk (`--costs`). Communication costs what the
cluster file says. `batch` also runs torch's own PipelineStage and FSDP2, on tensors without data
(`paper_peer.py`). `docs/paper.py` makes the page and its pictures of what this writes.
"""

import argparse
import itertools
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import piper
from piper.compiler import Program
from piper.directives import Directive
from piper.ir.chunk import CapturedModel
from piper.models import decoder, moe
from piper.models.causal import Sizes
from piper.plan.ops import Op
from piper.schedules.grid import Grid, grid_for, orders
from piper.simulate.calibrate import calibrate
from piper.simulate.cluster import Cluster, load_cluster
from piper.simulate.costs import Costs, Roofline
from piper.simulate.measured import Measured, MeasuredOn, read_costs, write_costs
from piper.simulate.simulate import Simulation, simulate
from piper.strategies import boundaries

GIB = 2**30
SCHEDULES = ("1f1b", "interleaved-1f1b", "dualpipe-v")
CLUSTERS = ("h200", "a100")
RECORDED = 4  # steps
Table = list[dict[str, str]]


@dataclass(slots=True, kw_only=True)
class Study:
    """A model that is captured once, and the strategies that are tried on it. Each layer is a region PP."""

    name: str
    config: Sizes
    samples: int  # of a microbatch, on one device
    length: int
    device: str = "cpu"
    compile: bool = True  # for simulation, nothing is compiled: what a compiler fuses costs less
    last: Program | None = None  # its recordings are used again
    model: Callable[[], nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        config = replace(self.config, stages=self.config.layers)
        kind = moe.MoEDecoder if isinstance(config, moe.Config) else decoder.Decoder
        self.model = lambda: kind(config)  # type: ignore[arg-type]

    def compiled(self, strategy: Sequence[Directive], replicas: int, microbatches: int) -> Program:
        """Compile and prove a strategy whose stages are divided over so many replicas."""
        rows = replicas * microbatches * self.samples
        tokens = torch.randint(self.config.vocab, (rows, self.length))
        job = piper.Job(
            model=self.model,
            loss=moe.token_loss,
            data=lambda: [{"tokens": tokens, "labels": tokens}],
            strategy=strategy,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
            precision="bf16",
        )
        self.last = piper.compile(job, device=self.device, compile=self.compile, captured=self.last)
        return self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a job is divided: a pipeline over ranks of `dp` devices, which divide experts in groups of `ep`."""

    pp: int
    dp: int
    ep: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    zero: int = 1
    ends: tuple[int, int] = (0, 1)  # the layers that the embedding and the head count as, to divide stages
    bucket_mb: float | None = None
    shared: frozenset[str] = frozenset()  # the kinds of communication that share one stream

    @property
    def devices(self) -> int:
        return self.pp * self.dp


def strategy_of(layers: int, layout: Layout) -> list[Directive]:
    """Return the directives of a layout."""
    grid = grid_for(layout.schedule, layout.pp, layout.microbatches) if layout.pp > 1 else None
    count = grid.stages if grid else 1
    stages = boundaries(layers, count, embedding=layout.ends[0], head=layout.ends[1])
    ranks = ranks_of(grid) if grid else {0: 0}

    def stream(kind: str) -> str | None:
        return "shared" if kind in layout.shared else None

    found: list[Directive] = []
    for stage, regions in enumerate(stages):
        where, devices = piper.at(PP=regions), range(ranks[stage] * layout.dp, (ranks[stage] + 1) * layout.dp)
        found.append(
            piper.replicate(
                where,
                devices,
                zero=layout.zero,
                bucket_mb=layout.bucket_mb,
                reduce_stream=stream("reduce"),
                gather_stream=stream("gather"),
            )
            if layout.dp > 1
            else piper.place(where, devices)
        )
        if layout.ep > 1:
            experts = piper.at(PP=regions, EP="*")
            found.append(piper.shard(experts, devices, ways=layout.ep, stream=stream("exchange")))
    if layout.microbatches > 1:
        found.append(piper.split(piper.at(), parts=layout.microbatches))
    if grid is not None:
        found += orders(grid, stage=[piper.at(PP=regions) for regions in stages])
    return found


def ranks_of(grid: Grid) -> dict[int, int]:
    """Return the rank of each stage."""
    return {action.stage: rank for rank, row in enumerate(grid.rows) for group in row for action in group}


def compiled(study: Study, layout: Layout) -> Program:
    """Compile a study's model under a layout."""
    strategy = strategy_of(study.config.layers, layout)
    return study.compiled(strategy, layout.dp, layout.microbatches)


def costs_for(cluster: Cluster, measured: Measured | None, outline: CapturedModel) -> Costs:
    """Return a cluster's costs: a roofline, or the times of chunks that a GPU took.

    Chunks are known by their names, because a GPU runs other kernels and so has other keys.
    """
    if measured is None:
        return Roofline(cluster)
    here = {
        chunk.key: measured.chunks[chunk.name] for chunk in outline.chunks if chunk.name in measured.chunks
    }
    return MeasuredOn(replace(measured, chunks=here), cluster)


def exposed(program: Program, found: Simulation, op: Op) -> float:
    """Return the seconds in which a device waits for a kind of communication, on average."""
    counts = [len(plan.devices) for plan in program.plans]
    waited = [account.exposed.get(op, 0.0) for account in found.accounts]
    return sum(n * seconds for n, seconds in zip(counts, waited, strict=True)) / sum(counts)


def peak(found: Simulation) -> float:
    """Return the largest peak of a device in GiB."""
    return max(memory.peak for memory in found.memories) / GIB


# (a) schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is divided for the comparison of schedules."""

    name: str
    config: moe.Config
    samples: int
    length: int
    pp: int
    ep: int
    microbatches: int
    ends: tuple[tuple[int, int], ...]  # ways to divide stages: each schedule gets what it is fastest with

    def study(self) -> Study:
        return Study(name=self.name, config=self.config, samples=self.samples, length=self.length)

    def layout(self, schedule: str, ends: tuple[int, int]) -> Layout:
        return Layout(
            pp=self.pp,
            dp=self.ep,
            ep=self.ep,
            schedule=schedule,
            microbatches=self.microbatches,
            ends=ends,
        )


FINE = moe.Config(layers=24, kv_heads=8, experts=48, top_k=8, hidden=256)  # 1.05 billion
# The shapes of the published system's own scripts (uw-syfi/piper, artifact/run_megatron.py).
COARSE = moe.Config(vocab=151_936, kv_heads=8, experts=4, top_k=2, hidden=3584)
NINE = moe.Config(vocab=151_936, dim=2048, layers=24, heads=32, kv_heads=8, experts=8, top_k=2, hidden=7168)
SMALL = Case(
    name="1B",
    config=FINE,
    samples=2,
    length=2048,
    pp=4,
    ep=8,
    microbatches=8,
    ends=((0, 1), (0, 2), (1, 2)),
)
CASES = (
    SMALL,
    replace(SMALL, microbatches=16),
    Case(
        name="1B published",
        config=COARSE,
        samples=16,
        length=512,
        pp=4,
        ep=4,
        microbatches=8,
        ends=((0, 4), (0, 6), (6, 6)),
    ),
    Case(
        name="9B published",
        config=NINE,
        samples=4,
        length=2048,
        pp=4,
        ep=8,
        microbatches=8,
        ends=((0, 2), (0, 4), (2, 4)),
    ),
)


def best_of(
    study: Study, case: Case, schedule: str, clusters: Sequence[str], measured: Measured | None
) -> dict[str, tuple[Simulation, Program]]:
    """Return the fastest step of a schedule on each cluster, by the ways to divide stages."""
    best: dict[str, tuple[Simulation, Program]] = {}
    for ends in case.ends:
        program = compiled(study, case.layout(schedule, ends))
        for name in clusters:
            costs = costs_for(load_cluster(name), measured, program.outline)
            found = simulate(program.plans, program.outline, costs)
            if name not in best or found.step < best[name][0].step:
                best[name] = found, program
    return best


def schedules(
    cases: Sequence[Case] = CASES,
    clusters: Sequence[str] = CLUSTERS,
    costs: Mapping[str, Measured] | None = None,
) -> Table:
    """Compare schedules. costs: measured, by the name of a model; models without costs use the roofline."""
    rows: Table = []
    studies: dict[str, Study] = {}
    for case in cases:
        study = studies.setdefault(case.name, case.study())
        measured = (costs or {}).get(case.name)
        base: dict[str, float] = {}
        for schedule in SCHEDULES:
            for name, (found, program) in best_of(study, case, schedule, clusters, measured).items():
                base.setdefault(name, found.step)
                rows.append(
                    {
                        "model": case.name,
                        "layout": f"PP{case.pp} x EP{case.ep}",
                        "microbatches": f"{case.microbatches} of {case.samples} x {case.length}",
                        "cluster": name,
                        "computing": "roofline" if measured is None else "measured",
                        "schedule": schedule,
                        "step ms": f"{1e3 * found.step:.1f}",
                        "over 1F1B": f"{base[name] / found.step:.2f}x",
                        "bubble %": f"{100 * found.bubble:.0f}",
                        "all-to-all exposed ms": f"{1e3 * exposed(program, found, 'exchange'):.1f}",
                        "peak GiB": f"{peak(found):.1f}",
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def sweep(
    cases: Sequence[Case] = CASES[2:],
    ranks: Sequence[int] = (4, 8),
    replicas: Sequence[int] = (1, 2, 4),
    clusters: Sequence[str] = CLUSTERS,
) -> Table:
    """Predict the published system's own sweep: its models on more ranks and replicas, which share experts.

    Each schedule has twice as many microbatches as ranks, and is divided as it is fastest with.
    """
    rows: Table = []
    for case in cases:
        study = case.study()
        for pp, dp in itertools.product(ranks, replicas):
            shape, base = replace(case, pp=pp, ep=dp, microbatches=2 * pp), dict[str, float]()
            tokens = shape.microbatches * shape.samples * shape.length / pp
            for schedule in SCHEDULES:
                for name, (found, _) in best_of(study, shape, schedule, clusters, None).items():
                    base.setdefault(name, found.step)
                    rows.append(
                        {
                            "model": case.name,
                            "layout": f"PP{pp} x DP{dp}",
                            "cluster": name,
                            "schedule": schedule,
                            "step ms": f"{1e3 * found.step:.1f}",
                            "over 1F1B": f"{base[name] / found.step:.2f}x",
                            "tokens/s of a device": f"{tokens / found.step:.0f}",
                            "bubble %": f"{100 * found.bubble:.0f}",
                            "peak GiB": f"{peak(found):.1f}",
                        }
                    )
                    print(rows[-1], file=sys.stderr, flush=True)
    return rows


# (b) streams

STREAMS: Mapping[int, frozenset[str]] = {
    1: frozenset({"reduce", "gather", "exchange"}),
    2: frozenset({"gather", "exchange"}),
    3: frozenset(),
}


def streams(
    config: Sizes = NINE,
    samples: Sequence[int] = (1, 2, 4),
    cluster: str = "a100",
    length: int = 2048,
    zeros: Sequence[int] = (0, 3),
    devices: int = 16,
    ep: int = 8,
) -> Table:
    """Compare collectives on one stream with those on a stream for each kind, by tokens of a device."""
    rows: Table = []
    for size in samples:
        study = Study(name="streams", config=config, samples=size, length=length)
        for zero in zeros:
            one = 0.0
            reductions: tuple[Op, ...] = ("all_reduce", "reduce_scatter")
            for count, shared in STREAMS.items():
                if zero == 0 and count == 3:
                    continue  # nothing is gathered
                program = compiled(study, Layout(pp=1, dp=devices, ep=ep, zero=zero, shared=shared))
                found = simulate(program.plans, program.outline, Roofline(load_cluster(cluster)))
                one = one or found.step
                rows.append(
                    {
                        "layout": f"DP{devices} x EP{ep}",
                        "zero": f"{zero}",
                        "tokens": f"{size * length}",
                        "streams": f"{count}",
                        "step ms": f"{1e3 * found.step:.1f}",
                        "over one stream": f"{one / found.step:.2f}x",
                        "all-to-all ms": f"{1e3 * talking(program, found, ('exchange',)):.1f}",
                        "reductions ms": f"{1e3 * talking(program, found, reductions):.1f}",
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def talking(program: Program, found: Simulation, ops: Iterable[Op]) -> float:
    """Return the seconds in which kinds of communication are under way on a device, on average."""
    counts = [len(plan.devices) for plan in program.plans]
    spent = [sum(account.communication.get(op, 0.0) for op in ops) for account in found.accounts]
    return sum(n * seconds for n, seconds in zip(counts, spent, strict=True)) / sum(counts)


# (d) scale

DENSE = decoder.Config.medium()  # 1.1 billion


def scale(
    config: Sizes = DENSE,
    replicas: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    clusters: Sequence[str] = CLUSTERS,
    samples: int = 2,
    length: int = 2048,
    microbatches: int = 32,
) -> Table:
    """Grow a job of two ranks from 2 devices on, each with the same work."""
    study, rows, base = Study(name="scale", config=config, samples=samples, length=length), Table(), {}
    for dp in replicas:
        layout = Layout(pp=2, dp=dp, microbatches=microbatches, zero=1)
        begin = time.perf_counter()
        program = compiled(study, layout)
        took = time.perf_counter() - begin
        for name in clusters:
            found = simulate(program.plans, program.outline, Roofline(load_cluster(name)))
            each = samples * length * microbatches / found.step / layout.pp
            base.setdefault(name, each)
            rows.append(
                {
                    "devices": f"{layout.devices}",
                    "layout": f"PP2 x DP{dp}",
                    "cluster": name,
                    "step ms": f"{1e3 * found.step:.1f}",
                    "tokens/s of a device": f"{each:.0f}",
                    "of 2 devices %": f"{100 * each / base[name]:.1f}",
                    "compile s": f"{took:.1f}" if dp > replicas[0] else f"{took:.1f} with capture",
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


# (e) buckets


def buckets(
    config: Sizes = DENSE,
    sizes: Sequence[float | None] = (1, 5, 25, 100, 400, None),
    zeros: Sequence[int] = (1, 2, 3),
    cluster: str = "h200",
    samples: int = 2,
    length: int = 2048,
    dp: int = 16,
) -> Table:
    """Compare bucket sizes. None: a bucket for each region, which is a layer."""
    study, rows = Study(name="buckets", config=config, samples=samples, length=length), Table()
    for zero in zeros:
        for size in sizes:
            layout = Layout(pp=2, dp=dp, microbatches=8, zero=zero, bucket_mb=size)
            program = compiled(study, layout)
            found = simulate(program.plans, program.outline, Roofline(load_cluster(cluster)))
            ops: tuple[Op, ...] = ("reduce_scatter", "gather")
            calls = sum(ins.op in ops for ins in program.plans.plans[0].instrs)
            rows.append(
                {
                    "zero": f"{zero}",
                    "bucket MB": "a layer" if size is None else f"{size:g}",
                    "collectives": f"{calls}",
                    "step ms": f"{1e3 * found.step:.1f}",
                    "exposed ms": f"{1e3 * sum(exposed(program, found, op) for op in ops):.1f}",
                    "peak GiB": f"{peak(found):.2f}",
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


# measured costs


def measure(case: Case, out: Path, *, device: str = "cuda", compile: bool = True) -> None:
    """Measure the chunks of a model on one device and write their costs, by the names of chunks.

    The first rank of DualPipe-V has the embedding, layers and the head, with whole and halved backwards: all
    that any rank runs under any of the schedules. It runs alone, one instruction after another, on a network
    that takes no time.
    """
    from gpu_overlap import network

    from piper.run.launch import launch_single_rank
    from piper.runtime.recorders import WARM
    from piper.runtime.worker import Options
    from piper.train.measure import profile_of

    torch.manual_seed(0)
    study = replace(case.study(), device=device, compile=compile)
    begin = time.perf_counter()
    program = compiled(study, case.layout("dualpipe-v", (0, 2)))
    (batch,) = program.job.data()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(streams=False, profile=RECORDED)
        free = network(Path(folder), 1e18, instant=True)
        with launch_single_rank(program, "rank:0", options, cluster=free) as run:
            for _ in range(WARM + RECORDED):
                run.step(batch)
            profile = profile_of(run, program, case.name, "rank:0")
    found = replace(calibrate(profile), node=8)
    named = {
        chunk.name: found.chunks[chunk.key] for chunk in program.outline.chunks if chunk.key in found.chunks
    }
    write_costs(replace(found, model=case.name, chunks=named), out)
    print(f"{out}: {len(named)} chunks, {len(found.chunks)} distinct, {time.perf_counter() - begin:.0f} s")
    for key, phases in found.chunks.items():
        name = next(chunk.name for chunk in program.outline.chunks if chunk.key == key)
        print(f"  {name:24} " + "  ".join(f"{phase} {1e3 * s:.3f} ms" for phase, s in phases.items()))


# the page's figures

PARTS: Mapping[str, str] = {
    "schedules": "(a) schedules of mixtures of experts",
    "sweep": "(a) the published models on 4 to 32 devices, before anything of it is measured",
    "measured": "(a) the same, with what a GPU took for each chunk: needs --costs",
    "streams": "(b) a stream for each kind of communication",
    "batch": "(c) the largest microbatch",
    "peer": "(c) the peer's memory, counted and measured",
    "scale": "(d) from 2 to 1,024 devices",
    "buckets": "(e) bucket sizes",
}


def table(rows: Table) -> str:
    """Write rows as a table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(row[name] for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def tables_of(text: str) -> dict[str, Table]:
    """Read the tables of a file of results, by their headings."""
    found: dict[str, Table] = {}
    heading, names = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            heading, names = line[3:], []
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not names:
                names = cells
            elif set(cells) != {"---"}:
                found.setdefault(heading, []).append(dict(zip(names, cells, strict=True)))
    return found


def with_tables(before: str, made: Mapping[str, str], about: str) -> str:
    """Return the text of the results file with some parts replaced and the others as they were."""
    kept = {name: table(rows) for name, rows in tables_of(before).items()}
    notes = dict(kept_notes(before))
    for name in made:
        notes[name] = about
    body = [
        f"## {name}\n\n{notes[name]}\n\n{made.get(name) or kept[name]}"
        for name in PARTS
        if name in {**kept, **made}
    ]
    return (
        "# The paper's results\n\nWritten by `benchmarks/paper.py`; `docs/paper.py` makes the page of it.\n\n"
        + "\n".join(body)
    )


def kept_notes(text: str) -> Iterable[tuple[str, str]]:
    """Yield the heading of each part of the results with the block that says how it was made."""
    for part in text.split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        yield heading, rest.partition("\n|")[0].strip()


def provenance(arguments: Sequence[str]) -> str:
    """Return how the figures were made: the command, the commit and the machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = " ".join(["python benchmarks/paper.py", *arguments])
    machine = f"{platform.machine()}; Python {platform.python_version()}, torch {torch.__version__}"
    return f"```text\ncommand: {command}\ncommit:  {commit}\nmachine: {machine}\n```"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", help="; ".join(f"{name}: {what}" for name, what in PARTS.items()))
    parser.add_argument("--costs", type=Path, action="append", default=[], help="measured costs; may repeat")
    parser.add_argument("--measure", type=Path, help="measure chunks on a GPU and write their costs here")
    parser.add_argument("--model", default="1B", help="of --measure")
    parser.add_argument("--out", type=Path, help="write the tables here; other parts of the file stay")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        measure(next(case for case in CASES if case.name == options.model), options.measure)
        return
    costs = {found.model: found for found in map(read_costs, options.costs)}
    parts = (
        options.parts.split(",") if options.parts else [part for part in PARTS if part != "measured" or costs]
    )
    made: dict[str, str] = {}
    for part in parts:
        if part == "measured":
            rows = schedules([case for case in CASES if case.name in costs], ("h200",), costs)
        elif part in ("batch", "peer"):
            import paper_peer

            rows = paper_peer.batch(workers=2) if part == "batch" else paper_peer.peer()
        else:
            run = {"schedules": schedules, "sweep": sweep, "streams": streams, "scale": scale}
            rows = {**run, "buckets": buckets}[part]()
        made[part] = table(rows)
        print(f"## {part}\n\n{made[part]}", flush=True)
    if options.out is not None:
        before = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
        options.out.write_text(with_tables(before, made, provenance(arguments)), encoding="utf-8")


if __name__ == "__main__":
    main()
