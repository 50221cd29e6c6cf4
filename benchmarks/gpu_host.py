"""What the host takes to issue a plan on a GPU, how long the GPU waits for it, and memory as foretold.

    python benchmarks/gpu_host.py [--layers 8 --dim 2048 --compile]
    python benchmarks/gpu_host.py --layers 4 --dim 256 --length 128 --zero 0,3   # where the host is slower

The executor alone is the same plan with instructions that do nothing. The rest is one rank of a pipeline with
replicas: real kernels, the network of an H200 cluster.
"""

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

import piper
from piper.compiler import Program
from piper.models import decoder
from piper.plan.instr import Instr
from piper.run.launch import SingleRankRun, launch_single_rank
from piper.runtime.cuda.graphs import WARM as UNTIL_CAPTURED
from piper.runtime.cuda.graphs import GraphExecutor
from piper.runtime.recorders import WARM
from piper.runtime.stream_executor import StreamExecutor
from piper.runtime.worker import Options

STAGES, REPLICAS, PARTS = 4, 4, 8


def job_of(config: decoder.Config, zero: int, length: int) -> piper.Job:
    """Stages of a decoder, each on several replicas."""
    samples = REPLICAS * PARTS
    tokens = torch.randint(config.vocab, (samples, length + 1), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    homes = [[*range(stage * REPLICAS, (stage + 1) * REPLICAS)] for stage in range(STAGES)]
    return piper.Job(
        model=lambda: decoder.Decoder(config),
        loss=decoder.token_loss,
        data=lambda: itertools.repeat(batch),
        strategy=[
            *(piper.replicate(piper.at(PP=stage), home, zero=zero) for stage, home in enumerate(homes)),
            piper.split(piper.at(), parts=PARTS),
            *piper.schedules.one_f_one_b(STAGES, PARTS),
        ],
        precision="bf16",
        clip_norm=1.0,
    )


def issue_time(executor: StreamExecutor, rounds: int = 9) -> float:
    """Seconds that the host takes to issue a step once, at its median."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        executor._issue()
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        executor.parked = [None] * len(executor.slots)
    return statistics.median(times)


def whole_issue(run: SingleRankRun, batch: Mapping[str, torch.Tensor]) -> float:
    """Seconds that the host takes to issue a real step, launches of kernels included."""
    executor = run.worker.executor
    assert isinstance(executor, StreamExecutor)
    run.worker.env.batch = batch
    with torch.no_grad():
        return issue_time(executor, 5)


def empty_executor(run: SingleRankRun) -> StreamExecutor:
    """The executor of a run's plan, whose instructions do nothing."""
    plan = run.worker.env.plan
    slots: list[object] = [None] * len(run.worker.env.slots)
    return StreamExecutor(
        plan,
        [lambda: None] * len(plan.instrs),
        slots,
        run.worker.env.index,
        device=0,
        accelerator=run.setup.device,
    )


def idle_by_host(step: Callable[[], object]) -> tuple[float, float, float]:
    """Of one step: the part in which the GPU does nothing, that in which it waits for the host, and its time.

    The host is to blame for an idle moment if what ends it had not been launched yet. The profiler slows the
    host down, so this is more than without it.
    """
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launched = {
        event["args"]["correlation"]: event["ts"] + event["dur"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    works = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"].get("correlation"))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    idle = blamed = 0.0
    reached = works[0][0]
    for begin, end, correlation in works:
        if begin > reached:
            idle += begin - reached
            blamed += max(0.0, min(launched.get(correlation, reached), begin) - reached)
        reached = max(reached, end)
    whole = reached - works[0][0]
    return idle / whole, blamed / whole, whole / 1e6


def rank_of(program: Program, rank: int, name: str) -> None:
    """One rank, timed and weighed."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with launch_single_rank(program, f"rank:{rank}", cluster="h200") as run:
        count = len(run.worker.env.plan.instrs)
        for batch in itertools.islice(program.job.data(), 5):
            run.step(batch)
        peak = run.peak()
        assert peak.measured is not None
        measured = peak.measured - before
        empty = issue_time(empty_executor(run)) / count
        issued = whole_issue(run, batch)
        print(
            f"{name:<22} {statistics.median(run.seconds[2:]) * 1e3:8.1f} ms  {count} instrs  "
            f"peak {measured / 2**30:.2f} GiB, planned {peak.planned / 2**30:.2f}, foretold "
            f"{peak.predicted / 2**30:.2f} ({measured / peak.predicted - 1:+.1%})  reserved "
            f"{torch.cuda.max_memory_reserved() / 2**30:.2f}  executor {empty * 1e6:.1f} us/instr, "
            f"with kernels {issued / count * 1e6:.0f}",
            flush=True,
        )
        found = [idle_by_host(lambda: run.step(batch)) for _ in range(3)]
        idle, blamed, whole = min(found, key=lambda told: told[1])
        print(
            f"{'':<22} of {whole * 1e3:.1f} ms under the profiler the GPU idles {idle:.1%}, "
            f"for the host {blamed:.2%}"
        )
    as_graph(program, rank, issued)
    gc.collect()
    torch.cuda.empty_cache()
    with launch_single_rank(program, f"rank:{rank}", Options(profile=3), cluster="h200") as run:
        for batch in itertools.islice(program.job.data(), WARM + 3):
            run.step(batch)
        recording, _ = run.recordings()[rank]
        instrs = run.worker.env.plan.instrs
        print(
            f"{'':<22} network, taken / foreseen: {', '.join(taken(run, instrs, recording.steps[-1]))}",
            flush=True,
        )


def as_graph(program: Program, rank: int, issued: float) -> None:
    """The same rank with its step as one graph; `issued`: what the host takes to issue it otherwise."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with launch_single_rank(program, f"rank:{rank}", Options(graphs=True), cluster="h200") as run:
        for batch in itertools.islice(program.job.data(), UNTIL_CAPTURED + 6):
            run.step(batch)
        peak = run.peak()
        assert peak.measured is not None
        executor = run.worker.executor
        assert isinstance(executor, GraphExecutor)
        run.worker.env.batch = batch
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            executor.intake.fill()
            executor.replay()
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        step = statistics.median(run.seconds[UNTIL_CAPTURED + 1 :])
        print(
            f"{'':<22} issued as one graph: {step * 1e3:.1f} ms, of the host "
            f"{statistics.median(times) * 1e6:.0f} us (else {issued * 1e6:.0f})  peak "
            f"{(peak.measured - before) / 2**30:.2f} GiB, reserved "
            f"{torch.cuda.max_memory_reserved() / 2**30:.2f}  captured in "
            f"{run.seconds[UNTIL_CAPTURED] - step:.2f} s",
            flush=True,
        )


def taken(
    run: SingleRankRun, instrs: Sequence[Instr], step: Sequence[tuple[float, float, float]]
) -> list[str]:
    """How long communication took beside how long the network takes, by op."""
    foreseen: dict[str, float] = {}
    took: dict[str, float] = {}
    for ins, (begin, end, _) in zip(instrs, step, strict=True):
        if ins.comm is None:
            continue
        members = next(group for group in run.plans.comms[ins.comm].groups if run.device in group)
        foreseen[ins.op] = foreseen.get(ins.op, 0.0) + run.network.seconds(ins.op, ins.nbytes, members)
        took[ins.op] = took.get(ins.op, 0.0) + end - begin
    return [f"{op} {took[op] * 1e3:.2f} / {foreseen[op] * 1e3:.2f} ms" for op in foreseen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--zero", default="0,2,3")
    asked = parser.parse_args()
    config = decoder.Config(
        vocab=32_768,
        dim=asked.dim,
        layers=asked.layers,
        heads=asked.dim // 128,
        kv_heads=asked.dim // 256,
        head_dim=128,
        hidden=3 * asked.dim,
        qk_norm=True,
        stages=STAGES,
    )
    for zero in map(int, asked.zero.split(",")):
        begin = time.perf_counter()
        program = piper.compile(job_of(config, zero, asked.length), compile=asked.compile)
        print(f"zero={zero}: compiled in {time.perf_counter() - begin:.1f} s", flush=True)
        for rank in (0, (STAGES - 1) * REPLICAS):
            rank_of(program, rank, f"zero={zero} rank {rank}")


if __name__ == "__main__":
    main()
