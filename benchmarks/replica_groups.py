"""256 devices in 32 machines: ZeRO-3 over all of them, inside machines, and with the state over all.

python benchmarks/replica_groups.py

Eight layers of an 8B decoder and its tables, four microbatches of one row of 4096 tokens on each device,
simulated on machines of eight H100 that differ in their links to each other. Writes
benchmarks/results/replica_groups.md.
"""

import os
import platform
import tempfile
from functools import partial
from pathlib import Path

import torch

import piper
from piper import at, replicate, split
from piper.compiler import Program
from piper.models import decoder

DEVICES, MACHINE, LENGTH, MICROBATCHES = 256, 8, 4096, 4
CONFIG = decoder.Config(
    vocab=32_000,
    dim=4096,
    layers=8,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=14_336,
    stages=1,
    by_layer=True,
)
LINKS = {
    "50 Gb/s": 6.25e9,
    "100 Gb/s": 12.5e9,
    "200 Gb/s": 25e9,
    "400 Gb/s": 50e9,
}  # of each device between machines
WANTED = 1.2  # times as fast as flat ZeRO-3, at least, where the link is the bottleneck
LAYOUTS: dict[str, dict[str, int]] = {
    "flat": {},
    f"within={MACHINE}": {"within": MACHINE},
    f"within={MACHINE}, optimizer_within={DEVICES}": {"within": MACHINE, "optimizer_within": DEVICES},
}
CLUSTER = """
devices = 8
memory = 80e9
memory_bandwidth = 3.35e12
[flops]
bfloat16 = 700e12
float32 = 67e12
[[link]]
name = "inside a machine"
devices = 8
bandwidth = 370e9
latency = 3e-6
[[link]]
name = "between machines"
bandwidth = {bandwidth}
latency = 15e-6
"""
RESULTS = Path(__file__).with_name("results") / "replica_groups.md"


def program(groups: dict[str, int]) -> Program:
    tokens = torch.zeros(DEVICES * MICROBATCHES, LENGTH, dtype=torch.int64)
    strategy = [replicate(at(), range(DEVICES), zero=3, **groups), split(at(), parts=MICROBATCHES)]
    job = piper.Job(
        model=partial(decoder.Decoder, CONFIG),
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=strategy,
        precision="bf16",
    )
    return piper.compile(job, device="cpu")


def rows(programs: dict[str, Program]) -> list[str]:
    """Return the rows of the table: a link and a layout each."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for link, bandwidth in LINKS.items():
            cluster = Path(folder) / "cluster.toml"
            cluster.write_text(CLUSTER.format(bandwidth=bandwidth), encoding="utf-8")
            flat = programs["flat"].simulate(cluster).step
            for name, made in programs.items():
                found = made.simulate(cluster)
                peak = max(memory.peak for memory in found.memories) / 2**30
                lines.append(
                    f"| {link} | {name} | {1e3 * found.step:.0f} | {flat / found.step:.2f}x | {peak:.1f} |"
                )
    return lines


def main() -> None:
    programs = {name: program(groups) for name, groups in LAYOUTS.items()}
    commit = os.popen("git rev-parse --short HEAD").read().strip()
    text = [
        "# Replicas of ZeRO groups, simulated",
        "",
        "```text",
        "command: python benchmarks/replica_groups.py",
        f"commit:  {commit}",
        f"machine: {os.cpu_count()} cores ({platform.machine()}), no GPU; torch {torch.__version__}",
        "```",
        "",
        f"{DEVICES} devices in {DEVICES // MACHINE} machines, 8 layers of an 8B decoder, {MICROBATCHES} "
        f"microbatches of {LENGTH} tokens on each. At least {WANTED}x is wanted where the link between "
        "machines is the bottleneck.",
        "",
        "| link of a device between machines | layout | step ms | times as fast as flat | GiB |",
        "| --- | --- | --- | --- | --- |",
        *rows(programs),
        "",
    ]
    RESULTS.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
