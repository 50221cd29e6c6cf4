"""Piper beside its peers on two CPU processes: the same model, batch, threads and optimizer, in one run.

Each side's processes stay alive and sleep while the other works; rounds alternate, so what else the machine
does hits both. Both sides are compiled with Inductor: the peer's blocks before they are wrapped or sharded,
as TorchTitan does, and our chunks. `--eager` compiles neither. Tokens are random, and what travels between
processes is what was computed. A row gives the median and the fastest step of each side, and the ratio of the
medians: above 1 Piper is faster. Leave the machine alone meanwhile. The peers are those of `piper selftest`.
"""

import argparse
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import closing
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

import piper
from piper.models import decoder
from piper.models.causal import mean_cross_entropy
from piper.selftest.peers import PEERS, Peer, Step, Training, compare, in_stages, pipeline_step, whole_step
from piper.selftest.rank_process import Processes, Rank
from piper.workers.transport.fork_server import ForkServer

CONFIG = decoder.Config(vocab=1024, dim=256, layers=8, heads=8, kv_heads=8, head_dim=32, hidden=640)
BATCH, LENGTH, MICROBATCHES, WORLD = 16, 128, 8, 2
PATIENCE = 600  # seconds: a first step compiles


def single_step(training: Training, rank: Rank) -> Step:
    """Return a step of plain PyTorch."""
    return whole_step(rank, training.stage(rank), training.batch(), mean_cross_entropy)


def zero_bubble_step(training: Training, rank: Rank) -> Step:
    """Return a step of torch's zero-bubble schedule."""
    from torch._functorch import config as functorch_config  # in the rank alone: it cannot be sent there

    def schedule(stage: PipelineStage, parts: int, **options: object) -> ScheduleInterleavedZeroBubble:
        return ScheduleInterleavedZeroBubble([stage], parts, **options)  # type: ignore[arg-type]

    # The schedule goes through the graph of a compiled block twice, as torch's own message says.
    functorch_config.donated_buffer = False
    return pipeline_step(training, rank, schedule)


ROWS = {
    "single": Peer(name="single", title="", step=single_step, strategy=lambda training: []),
    **{peer.name: peer for peer in PEERS if peer.name != "tp"},
    "zero-bubble": Peer(
        name="zero-bubble",
        title="",
        step=zero_bubble_step,
        strategy=partial(in_stages, order=piper.schedules.zero_bubble),
        staged=True,
    ),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(ROWS)}; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="compile neither side")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print(heading(options.eager))
    print(f"{'against':12} {'piper':>10} {'fastest':>10} {'peer':>10} {'fastest':>10} {'peer / piper':>13}")
    for name in options.names or ROWS:
        training = Training(
            config=CONFIG,
            ranks=1 if name == "single" else WORLD,
            samples=BATCH,
            length=LENGTH,
            microbatches=MICROBATCHES,
            compiled=not options.eager,
        )
        with (
            closing(ForkServer("piper.selftest.rank_process")) as forks,
            closing(Processes(forks, training.ranks, PATIENCE)) as processes,
        ):
            both = compare(ROWS[name], training, options.rounds, processes)
        cells = [f(times) for times in (both.ours, both.theirs) for f in (statistics.median, min)]
        figures = " ".join(f"{seconds * 1e3:7.0f} ms" for seconds in cells)
        print(f"{name:12} {figures} {1 / both.ratio:12.2f}x", flush=True)


def heading(eager: bool) -> str:
    """Return the command, the commit and the machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.1f} before"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return (
        f"command: python benchmarks/peers_cpu.py{' --eager' if eager else ''}\n"
        f"commit:  {commit}\n"
        f"machine: {machine}; {versions}; OMP_NUM_THREADS=1\n"
    )


if __name__ == "__main__":
    main()
