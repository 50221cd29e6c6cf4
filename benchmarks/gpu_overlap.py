"""Expert exchanges behind compute: a device of DualPipe-V over a mixture of experts, alone on one GPU.

First the device runs on a network that takes no time, one thing after another: so long it computes. From that
a network is made on which its exchanges of rows take half as long, regrouping included. On this one it runs
with streams side by side, and one thing after another, in turns; when each instruction ran is recorded first.

python benchmarks/gpu_overlap.py [--device N] [--trace FILE]
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from exposure import Exposure, exposure, main_phase
from torch import Tensor

import piper
from piper.compiler import Program
from piper.models import moe
from piper.plan.ops import Op, Routing
from piper.plan.plan import Plan
from piper.run.launch import SingleRankRun, launch_single_rank
from piper.runtime.recorders import WARM
from piper.runtime.worker import Options
from piper.simulate.account import Span
from piper.train.measure import profile_of
from piper.view.plan_trace import profile_trace

RATIO = 0.5  # of exchanges to compute
RECORDED = 4  # steps
ROUNDS, STEPS = 4, 3  # of both sides, in turns
EXCHANGES: tuple[Op, ...] = ("exchange",)
HOMES = ([0, 1], [2, 3], [2, 3], [0, 1])  # of the four stages: a V over two ranks of two devices
LATENCY = 3e-6
NETWORK = """
memory = 141e9
memory_bandwidth = 4.8e12

[flops]
bfloat16 = 989e12

[[link]]
name = "between experts"
devices = 2
bandwidth = {bandwidth}
latency = {latency}

[[link]]
name = "between stages"
bandwidth = {stages}
latency = {latency}
"""
Steps = Sequence[Sequence[Span]]  # by recorded step: a span for each instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The job, and the device of it that runs."""

    config: moe.Config
    parts: int  # microbatches
    samples: int  # in each, on each device
    length: int
    # The ranks below the first hold layers and nothing else, so every stage of theirs is the same code.
    device: int = 2


LARGE = Sizes(
    config=moe.Config(
        vocab=8192,
        dim=2048,
        layers=4,
        heads=16,
        kv_heads=8,
        head_dim=128,
        hidden=1024,
        experts=32,
        top_k=4,
        stages=4,
    ),
    parts=16,
    samples=4,
    length=2048,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What was measured, in seconds."""

    build: float  # to the end of the first step
    ratio: float  # of exchanges to compute, as they were one after another
    bandwidth: float  # bytes per second that give it
    regrouping: float  # the part of the exchanges that is not the network's
    overlapped: float  # a step
    serial: float
    main: Exposure  # of exchanges, in the main phase
    whole: Exposure  # and in the whole step
    serial_main: float  # the main phase, one thing after another
    stretch: float  # of what computes, beside exchanges
    chunks: tuple[tuple[str, float], ...]  # phases of chunks, and exchanges, one after another

    @property
    def gain(self) -> float:
        """The throughput of a step beside that without overlap."""
        return self.serial / self.overlapped

    @property
    def main_gain(self) -> float:
        """The same of the main phase."""
        return self.serial_main / self.main.seconds


def job_of(sizes: Sizes) -> tuple[piper.Job, dict[str, Tensor]]:
    """A layer to a stage, experts divided over two devices; and its batch."""
    config = sizes.config
    rows = 2 * sizes.parts * sizes.samples
    tokens = torch.randint(config.vocab, (rows, sizes.length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(PP=stage), devices=home, zero=1) for stage, home in enumerate(HOMES)
    ]
    strategy += [
        piper.shard(piper.at(PP=stage, EP="*"), devices=home, ways=2) for stage, home in enumerate(HOMES)
    ]
    strategy += [
        piper.split(piper.at(), axis="MB", parts=sizes.parts),
        *piper.schedules.dualpipe_v(2, sizes.parts),
    ]
    job = piper.Job(
        model=lambda: moe.MoEDecoder(config),
        loss=moe.token_loss,
        data=lambda: [batch],
        strategy=strategy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        precision="bf16",
    )
    return job, batch


def network(folder: Path, bandwidth: float, *, instant: bool = False) -> str:
    """The file of a network on which exchanges have this bandwidth, and everything else is fast."""
    file = folder / f"{bandwidth:.0f}.toml"
    file.write_text(
        NETWORK.format(
            bandwidth=bandwidth,
            stages=bandwidth if instant else 370e9,
            latency=0.0 if instant else LATENCY,
        )
    )
    return str(file)


def recorded(run: SingleRankRun) -> Steps:
    """The steps that a device has recorded."""
    recording, _ = run.recordings()[run.device]
    return [[Span(start=start, end=end) for start, end, _ in step] for step in recording.steps]


def taken(plan: Plan, steps: Steps, op: Op) -> float:
    """What the instructions of a kind take in a step, each at its median."""
    places = [place for place, ins in enumerate(plan.instrs) if ins.op == op]
    return sum(statistics.median(step[place].end - step[place].start for step in steps) for place in places)


def by_chunk(plan: Plan, steps: Steps) -> tuple[tuple[str, float], ...]:
    """The median of each phase of a chunk, and of exchanges there and back."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for ins, span in zip(plan.instrs, step, strict=True):
            if ins.op == "compute":
                name = f"{ins.computes.phase} {ins.computes.chunk}"
            elif isinstance(ins.payload, Routing):
                name = f"{ins.op} {'to the experts' if ins.payload.outward else 'back'}"
            else:
                continue
            found.setdefault(name, []).append(span.end - span.start)
    return tuple((name, statistics.median(times)) for name, times in sorted(found.items()))


def typical(found: Sequence[Exposure]) -> Exposure:
    """The step whose exposed part is the median."""
    return sorted(found, key=lambda one: one.share)[len(found) // 2]


def bandwidth_for(plan: Plan, computing: float, regrouping: float) -> float:
    """The bandwidth with which a device's exchanges take RATIO of what it computes."""
    exchanges = [ins for ins in plan.instrs if ins.op == "exchange"]
    seconds = RATIO * computing - regrouping - len(exchanges) * LATENCY
    if seconds <= 0:
        raise RuntimeError(
            f"regrouping takes {regrouping * 1e3:.1f} ms of {computing * 1e3:.1f} ms of compute"
        )
    return sum(ins.nbytes for ins in exchanges) / seconds


def measure(
    sizes: Sizes = LARGE, *, device: str = "cuda", cache: str | None = None, trace: Path | None = None
) -> Beside:
    """Run the device as the module says; `trace`: where the overlapped steps are written for Perfetto."""
    begin = time.perf_counter()
    job, batch = job_of(sizes)
    compiled = {} if cache is None else {"compile": True, "cache": cache}
    program = piper.compile(job, device=device, **compiled)  # type: ignore[arg-type]
    plan, on = program.plans.of(sizes.device), f"rank:{sizes.device}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = network(folder, 1e18, instant=True)
        options = Options(streams=False, profile=RECORDED)
        with launch_single_rank(program, on, options, cluster=free) as run:
            run.step(batch)
            build = time.perf_counter() - begin
            steps = after(run, batch, WARM + RECORDED - 1)
        computing, regrouping = taken(plan, steps, "compute"), taken(plan, steps, "exchange")
        bandwidth = bandwidth_for(plan, computing, regrouping)
        del run
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        busy = network(folder, bandwidth)
        with ExitStack() as stack:
            sides = {
                streams: stack.enter_context(
                    launch_single_rank(program, on, Options(streams=streams, profile=RECORDED), cluster=busy)
                )
                for streams in (True, False)
            }
            times = {streams: after(side, batch, WARM + RECORDED) for streams, side in sides.items()}
            if trace is not None:
                trace.write_text(profile_trace(profile_of(sides[True], program, "", on)))
            for _ in range(ROUNDS):
                for side in sides.values():
                    for _ in range(STEPS):
                        side.step(batch)
            seconds = {s: statistics.median(side.seconds[WARM + RECORDED :]) for s, side in sides.items()}
    mains = {streams: main_exposures(program, plan, found) for streams, found in times.items()}
    return Beside(
        build=build,
        ratio=taken(plan, times[False], "exchange") / taken(plan, times[False], "compute"),
        bandwidth=bandwidth,
        regrouping=regrouping,
        overlapped=seconds[True],
        serial=seconds[False],
        main=typical(mains[True]),
        whole=typical([exposure(plan, step, EXCHANGES) for step in times[True]]),
        serial_main=statistics.median(found.seconds for found in mains[False]),
        stretch=taken(plan, times[True], "compute") / taken(plan, times[False], "compute"),
        chunks=by_chunk(plan, times[False]),
    )


def after(run: SingleRankRun, batch: dict[str, Tensor], steps: int) -> Steps:
    """What a device has recorded after some more steps."""
    for _ in range(steps):
        run.step(batch)
    return recorded(run)


def main_exposures(program: Program, plan: Plan, steps: Steps) -> list[Exposure]:
    """What is exposed of the exchanges in each step's main phase."""
    return [exposure(plan, step, EXCHANGES, main_phase(program.graph, plan, step)) for step in steps]


def shown(found: Beside) -> str:
    """The figures, and where the time goes."""
    main, whole = found.main, found.whole
    lines = [
        f"step          {found.overlapped * 1e3:.1f} ms, one after another {found.serial * 1e3:.1f} ms:"
        f" {found.gain:.2f}x",
        f"main phase    {main.seconds * 1e3:.1f} ms, one after another {found.serial_main * 1e3:.1f} ms:"
        f" {found.main_gain:.2f}x",
        f"exposed       {main.exposed * 1e3:.2f} of {main.communication * 1e3:.1f} ms in the main phase:"
        f" {100 * main.share:.1f} %; {whole.exposed * 1e3:.2f} of {whole.communication * 1e3:.1f} ms"
        f" in the step: {100 * whole.share:.1f} %",
        f"idle          {(main.seconds - main.computing) * 1e3:.2f} ms of the main phase nothing computes;"
        f" what computes takes {found.stretch:.3f}x of its time one after another",
        f"exchanges     {found.ratio:.3f} of compute, at {found.bandwidth / 1e9:.0f} GB/s;"
        f" regrouping takes {found.regrouping * 1e3:.1f} ms of a step",
        f"first step    after {found.build:.1f} s",
        *(f"  {seconds * 1e3:8.3f} ms  {name}" for name, seconds in found.chunks),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=int, default=LARGE.device, help="of the plan, 0 to 3")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "piper-bench-cache"))
    parser.add_argument("--trace", type=Path, help="write the overlapped steps here, for Perfetto")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to see that it runs")
    asked = parser.parse_args()
    if asked.tiny:
        config = moe.Config.tiny(layers=4, stages=4)
        tiny = Sizes(config=config, parts=4, samples=1, length=16, device=asked.device)
        print(shown(measure(tiny, device="cpu", trace=asked.trace)))
        return
    sizes = Sizes(
        config=LARGE.config,
        parts=LARGE.parts,
        samples=LARGE.samples,
        length=LARGE.length,
        device=asked.device,
    )
    print(shown(measure(sizes, cache=asked.cache, trace=asked.trace)))


if __name__ == "__main__":
    main()
