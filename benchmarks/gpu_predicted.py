"""The simulated and the measured time and memory of one device, for shapes that no figure was fitted to.

python benchmarks/gpu_predicted.py [--rows NAME,NAME] [--steps N]

Each row is a stage of three of a decoder, with two layers, four devices and eight microbatches, compiled. The
first rows are replicas; the others are layouts that compose: ZeRO in groups, a stage under tensor parallelism
between others of replicas, and a sequence over four devices through a mixture of experts. A row
runs alone on one GPU with `rank:N`: real kernels and real memory, communication that takes the time of the
h200 network model. The simulation runs the same plan with the costs of the h200 cluster file. Memory is
predicted in the order in which the host issues instructions: that is when the allocator takes and returns it.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import piper
from piper.compiler import Program
from piper.models import decoder, moe
from piper.runtime.memory_release import predicted_peak
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import Simulation, simulate_alone

STAGES, REPLICAS, PARTS = 3, 4, 8
DEVICE = REPLICAS  # the first of the second stage: neither embedding nor head
TIME_BAR, MEMORY_BAR = 0.10, 0.03
GIB = 2**30


Layout = Callable[["Shape", int, range], list[piper.Directive]]  # of a stage and its devices


def replicas(shape: "Shape", stage: int, devices: range) -> list[piper.Directive]:
    """Replicate the stage."""
    return [piper.replicate(piper.at(PP=stage), devices, zero=shape.zero)]


def groups(shape: "Shape", stage: int, devices: range) -> list[piper.Directive]:
    """Shard parameters and gradients in pairs of devices, and the optimizer's state over all."""
    return [piper.replicate(piper.at(PP=stage), devices, zero=shape.zero, within=2, optimizer_within=4)]


def tensor(shape: "Shape", stage: int, devices: range) -> list[piper.Directive]:
    """Shard the weights of the stage that is measured, and replicate the others."""
    if DEVICE not in devices:
        return replicas(shape, stage, devices)
    return [piper.shard(piper.at(PP=stage), devices, axis="TP", weights=decoder.SHARDED_WEIGHTS, between=1)]


def tensor_fp8(shape: "Shape", stage: int, devices: range) -> list[piper.Directive]:
    """Do the same, with products in fp8."""
    return [*tensor(shape, stage, devices), piper.precision(piper.at(PP=stage), "fp8")]


def experts(shape: "Shape", stage: int, devices: range) -> list[piper.Directive]:
    """Shard the sequence over the devices, and the experts over the same ones."""
    fields = {"tokens": 1, "labels": 1}
    return [
        piper.shard(piper.at(PP=stage), devices, axis="CP", batch=fields, balance="zigzag"),
        piper.shard(piper.at(PP=stage, EP="*"), devices),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer, the samples of a microbatch and their tokens, and the level of ZeRO."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    samples: int
    tokens: int
    zero: int = 0
    head_dim: int = 128
    layout: Layout = replicas

    @property
    def rows(self) -> int:
        """Return the samples of a step: under `experts` all devices of a stage have the same ones."""
        return PARTS * self.samples * (1 if self.layout is experts else REPLICAS)

    @property
    def model(self) -> nn.Module:
        sizes = {
            "vocab": 1024,
            "dim": self.dim,
            "layers": 2 * STAGES,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden": self.hidden,
            "stages": STAGES,
            "by_layer": True,
        }
        if self.layout is experts:
            return moe.MoEDecoder(moe.Config(**sizes, experts=32, top_k=4))
        return decoder.Decoder(decoder.Config(**sizes))


SHAPES = {
    "2048": Shape(dim=2048, hidden=5632, heads=16, kv_heads=4, samples=2, tokens=2048, zero=1),
    "2048 long": Shape(dim=2048, hidden=5632, heads=16, kv_heads=4, samples=1, tokens=8192, zero=1),
    "3072": Shape(dim=3072, hidden=8192, heads=24, kv_heads=8, samples=1, tokens=2048, zero=2),
    "5120": Shape(dim=5120, hidden=13824, heads=40, kv_heads=40, samples=1, tokens=2048, zero=3),
    "5120 wide": Shape(dim=5120, hidden=13824, heads=40, kv_heads=40, samples=4, tokens=2048, zero=0),
    "8192": Shape(dim=8192, hidden=28672, heads=64, kv_heads=8, samples=1, tokens=4096, zero=2),
    "groups": Shape(
        dim=4096, hidden=14336, heads=32, kv_heads=8, samples=1, tokens=4096, zero=3, layout=groups
    ),
    "tensor": Shape(dim=4096, hidden=14336, heads=32, kv_heads=8, samples=1, tokens=4096, layout=tensor),
    "tensor fp8": Shape(
        dim=4096, hidden=14336, heads=32, kv_heads=8, samples=1, tokens=4096, layout=tensor_fp8
    ),
    "experts": Shape(dim=4096, hidden=1536, heads=64, kv_heads=4, samples=1, tokens=32_768, layout=experts),
}


def program_of(shape: Shape, cache: str, device: str) -> Program:
    """Compile a job of three stages in a row."""
    tokens = torch.randint(1024, (shape.rows, shape.tokens))
    places = [
        directive
        for stage in range(STAGES)
        for directive in shape.layout(shape, stage, range(REPLICAS * stage, REPLICAS * (stage + 1)))
    ]
    job = piper.Job(
        model=lambda: shape.model,
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=[
            *places,
            piper.split(piper.at(), parts=PARTS),
            *piper.schedules.one_f_one_b(stages=STAGES, microbatches=PARTS),
        ],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        precision="bf16",
    )
    return piper.compile(job, device=device, compile=True, cache=cache)


def predicted(program: Program) -> Simulation:
    """Simulate the device by itself."""
    return simulate_alone(program.plans, program.outline, Roofline(load_cluster("h200")), DEVICE)


def measured(program: Program, steps: int) -> tuple[float, int]:
    """Return the seconds of a step of the device by itself, and its peak bytes."""
    (batch,) = program.job.data()
    with piper.launch(program, on=f"rank:{DEVICE}") as run:
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run.step(batch)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:]), run.peak().measured  # type: ignore[attr-defined]


def row(name: str, cache: str, steps: int) -> str:
    """Compare one shape."""
    gc.collect()
    torch.cuda.empty_cache()
    shape = SHAPES[name]
    program = program_of(shape, cache, "cuda")
    found = predicted(program)
    seconds, peak = measured(program, steps)
    planned = predicted_peak(program.plans.of(DEVICE))
    off, held = found.step / seconds - 1, planned / peak - 1
    good = abs(off) <= TIME_BAR and abs(held) <= MEMORY_BAR
    fullest = planned / GIB
    return (
        f"{name:10} zero={shape.zero} {shape.samples} x {shape.tokens}: predicted {1e3 * found.step:7.1f} ms "
        f"measured {1e3 * seconds:7.1f} ms {100 * off:+5.1f} %; predicted {fullest:6.2f} GiB "
        f"measured {peak / GIB:6.2f} GiB {100 * held:+5.1f} %  {'holds' if good else 'short'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(SHAPES))
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        for name in options.rows.split(","):
            begin = time.perf_counter()
            print(f"{row(name, cache, options.steps)}  ({time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
