"""Measures the machine it runs on, as an entry for the simulator's clusters."""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import median_high
from time import perf_counter
from typing import cast

import torch
from torch import Tensor, nn

import piper
from piper.capture.precision.fp8 import CAPABLE
from piper.compiler import compile
from piper.process.files import write_output
from piper.run.launch import launcher, machine_memory
from piper.runtime.accelerator import accelerators, computing_on, device_kind, is_accelerator
from piper.runtime.worker import Options
from piper.simulate.calibrate import MeasuredTimes, collect_times
from piper.simulate.cluster import FP8, Cluster, Link
from piper.simulate.measured import by_size, line_through
from piper.train.measure import profile_of

WIDTHS = (32, 128, 256, 512, 1024)  # of the layers whose gradients travel: 4 KiB to 4 MiB
STEPS, WARM = 6, 3  # recorded, and taken in all before
ROUNDS = 2  # of an all-reduce between two
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SIDE = {False: 256, True: 8192}  # of the matrices that are multiplied, by whether on an accelerator
COPIED = {False: 2**26, True: 2**30}  # bytes, likewise
TINY = 200  # kernels with next to nothing to do, one after another
MOST = 1.0  # seconds for one measurement


class Layers(nn.Module):
    """Square layers of several widths, each a region of its own, so that each travels by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(width, width)) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        total = x.mean()
        for weight in self.weights:
            with piper.annotate("LAYER"):
                total = total + (weight * x.mean()).mean()
        return total


def batches() -> list[dict[str, Tensor]]:
    """Return small batches, enough for all steps."""
    return [{"x": torch.ones(2, 4)} for _ in range(STEPS + WARM)]


def measure() -> Cluster:
    """Measure this machine: its arithmetic and memory, and the links between two of its processes."""
    kind = device_kind(None)
    with computing_on(1):  # as a worker does
        flops = {name: arithmetic(kind, dtype) for name, dtype in TYPES.items()}
        if kind == "cuda" and torch.cuda.get_device_capability() >= CAPABLE:
            flops[FP8] = arithmetic(kind, torch.float8_e4m3fn)
        bandwidth = traffic(kind)
    latency, peak, gap = conversation()
    device = torch.get_device_module(kind).get_device_properties(0) if is_accelerator(kind) else None
    on_host = 1.0 if device is None else 0.0  # a process that sends or receives copies
    link = Link(name="node", devices=0, bandwidth=peak, latency=latency, cores=on_host)
    return Cluster(
        name="measured",
        links=(link,),
        flops=flops,
        memory=float(device.total_memory if device else machine_memory()),
        memory_bandwidth=bandwidth,
        launch=gap,
        kernel=tiny(kind),
        devices=accelerators() or 64,
        cores=0 if device else os.cpu_count() or 1,
    )


def best(run: Callable[[], object], kind: str) -> float:
    """Return the shortest of several runs, in seconds."""
    run()
    shortest, until = float("inf"), perf_counter() + MOST
    while perf_counter() < until:
        begin = perf_counter()
        run()
        if is_accelerator(kind):
            torch.accelerator.synchronize()
        shortest = min(shortest, perf_counter() - begin)
    return shortest


def arithmetic(kind: str, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product."""
    there = is_accelerator(kind)
    side = SIDE[there] // 4 if dtype == torch.float64 and there else SIDE[there]
    a, b = (torch.ones(side, side, device=kind).to(dtype) for _ in range(2))
    multiply = partial(torch.mm, a, b)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=kind)
        multiply = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    return 2 * side**3 / best(multiply, kind)


def traffic(kind: str) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.zeros(COPIED[is_accelerator(kind)], dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), kind)


def tiny(kind: str) -> float:
    """Return the seconds of a kernel that has next to nothing to do."""
    value = torch.ones(8, device=kind)

    def many() -> None:
        for _ in range(TINY):
            value.add_(1.0)

    return best(many, kind) / TINY


def small_job() -> piper.Job:
    """Return a job of two workers that sends more than it computes."""
    return piper.Job(
        model=Layers,
        loss=lambda model, batch: cast(Tensor, model(batch["x"])),
        data=batches,
        strategy=[piper.replicate(piper.at(), [0, 1])],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        steps=STEPS + WARM,
    )


def conversation() -> tuple[float, float, float]:
    """Run a small job on two workers. Return latency and bandwidth, and the time between two instructions."""
    program = compile(small_job())
    with launcher(program, "local", Options(profile=STEPS)) as run:
        for batch in batches():
            run.step(batch)
        profile = profile_of(run, program, "", "local")
    samples = MeasuredTimes()
    collect_times(profile, samples, by_thread=False)
    sizes = by_size(samples.talks["all_reduce"])
    line = line_through([(size, min(times)) for size, times in sizes])  # other work can only slow it down
    bandwidth = 1 / line.slope if line.slope else 1e12
    return line.base / ROUNDS, bandwidth, median_high(samples.gaps) if samples.gaps else 0.0


def toml_lines(record: Cluster | Link) -> Iterator[str]:
    """Yield the figures of a cluster or link that are known, and the name of a link, as lines of TOML."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):
            yield f"{field.name} = {value:.4g}"
        elif isinstance(value, int):
            yield f"{field.name} = {value}"
        elif isinstance(record, Link):
            yield f'{field.name} = "{value}"'


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster's file."""
    lines = ["# Measured by `piper profile --cluster-out`.", *toml_lines(cluster), "", "[flops]"]
    lines += [f"{name} = {peak:.4g}" for name, peak in cluster.flops.items()]
    for link in cluster.links:
        lines += ["", "[[link]]", *toml_lines(link)]
    write_output(path, "\n".join(lines) + "\n", lines[0], "the cluster")
