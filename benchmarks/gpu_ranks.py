"""Whole jobs of four NCCL ranks on one GPU: Piper beside torch, in the same run.

    python -m benchmarks.gpu_ranks --rows 1f1b,fsdp --size small --out ranks.jsonl
    python -m benchmarks.gpu_ranks --device cpu --size tiny --eager --steps 3  # no GPU: the numbers alone

Both sides train the same model from the same weights on the same random batch: in bf16, with weights, sums of
gradients over microbatches, reductions and fused AdamW in float32. Both are compiled: the peer's blocks and
loss, as TorchTitan does. Ranks have different `NCCL_HOSTID`, so NCCL takes them for machines and sends over
sockets, and MPS gives each a quarter of the GPU. The figures are those of four ranks on one GPU: they show
schedules, overlap, launches and memory, not what NVLink or InfiniBand would take.

A line for each row and side is printed when it is measured: the median of the second half of the steps, the
memory of the worst rank, the fifth step over the twentieth, and losses. Piper's side also reads the batch
from the host, computes the norm of the gradient and hands its result to the driver in every step.
"""

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.ranks_rows import RANKS, ROWS, SIZES
from benchmarks.ranks_sides import (
    Failed,
    Figures,
    ProcessSide,
    Task,
    free_port,
    set_for_children,
    shared_gpu,
    side_of,
)
from piper.ir.format import count

NETWORK = {  # of both sides
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # With several threads and sockets for each connection those of four ranks fill the host's cores.
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
}
PATIENCE = 300.0  # seconds for one row of one side
LEAST = 5.0  # seconds that are left of a budget for another row
EAGER = "eager"  # the peer without compiled blocks
SHOWN = 3  # losses in a line
MEMORY = 0.85  # of the peer's memory at most


@dataclass(slots=True, kw_only=True)
class Report:
    """What was measured so far. Lines are printed at once and written as JSON."""

    facts: Mapping[str, object]
    out: Path | None
    figures: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)  # by row and side

    def add(self, task: Task, side: str, round_: int, figures: Figures) -> None:
        """Take the figures of a row and a side."""
        self.figures.setdefault((task.row, side), []).append(figures)
        losses = " ".join(f"{loss:.4f}" for loss in figures.losses[:SHOWN])
        print(
            f"{task.size:10}{task.row:18}{side:6}{figures.ms:9.1f} ms {figures.gib:6.2f} GiB  "
            f"5th/20th {figures.fifth:.2f}  losses {losses}  norm {figures.norm:.4f}  "
            f"first step after {figures.build_s + figures.times[0]:.1f} s"
            + (f"  {figures.repeated} steps run again" if figures.repeated else ""),
            flush=True,
        )
        if figures.profile is not None:
            print(profile_line(figures.profile), flush=True)
        self.write(task, side, round_, figures.as_dict())

    def fail(self, task: Task, side: str, round_: int, error: str) -> None:
        """Take the error of a row and a side."""
        lines = error.strip().splitlines()
        said = [line for line in lines if line[:1].strip() and "Traceback" not in line]
        print(f"{task.size:10}{task.row:18}{side:6}  failed: {' | '.join(said)[-600:]}", flush=True)
        for line in lines[-40:]:
            print(f"    {line[:200]}", file=sys.stderr, flush=True)
        self.write(task, side, round_, {"error": error[-4000:]})

    def write(self, task: Task, side: str, round_: int, about: Mapping[str, object]) -> None:
        """Append a line to the file."""
        if self.out is None:
            return
        line = {"row": task.row, "size": task.size, "side": side, "round": round_, **self.facts, **about}
        if task.samples is not None:
            line["samples"] = task.samples
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def compare(self, row: str, sides: Sequence[str]) -> None:
        """Print a row's ratios, where both sides have been measured."""
        ours = self.figures.get((row, "piper"), [])
        for side in sides:
            theirs = self.figures.get((row, side), [])
            if side == "piper" or not ours or not theirs:
                continue
            ms, peer_ms = (statistics.mean(one.ms for one in found) for found in (ours, theirs))
            gib, peer_gib = (max(one.gib for one in found) for found in (ours, theirs))
            pairs = zip(ours[0].losses, theirs[0].losses, strict=False)
            apart = max(abs(a - b) / abs(b) for a, b in pairs)
            norm = abs(ours[0].norm - theirs[0].norm) / theirs[0].norm
            agree = f"losses apart by {apart:.1e}, norms by {norm:.1e}"
            if peer_gib:
                asked, time_, memory = ROWS[row].asked, ms / peer_ms, gib / peer_gib
                holds = "holds" if time_ <= asked and memory <= MEMORY else "short"
                agree = (
                    f"time {time_:.3f}x (asked {asked:.2f}), memory {memory:.3f}x (asked {MEMORY}), {holds}; "
                    f"{agree}"
                )
            print(f"{'':10}{row:18}piper / {side}: {agree}", flush=True)


def profile_line(profile: Mapping[str, float]) -> str:
    """Return where the time of the profiled steps went."""
    times = ("compute", "busy", "gaps", "exposed", "nccl", "copies")
    counts = ("kernels", "nccl kernels", "copy calls", "launches")
    shown = [f"{name} {profile[name]:.1f} ms" for name in times]
    shown += [f"{name} {profile[name]:.0f}" for name in counts]
    return f"{'':8}2 steps of rank 1: " + ", ".join(shown)


def facts_of(device: str, mps: bool) -> dict[str, object]:
    """Return what was run, of which commit, on which machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    where = (
        f"{count(RANKS, 'rank')} on {count(gpus, 'GPU')}" if gpus else f"{count(RANKS, 'rank')} on the host"
    )
    return {
        "ranks": where,
        "mps": mps,
        "commit": commit or "unknown",
        "machine": machine() if gpus else f"{os.cpu_count()} cores ({platform.machine()})",
        "torch": torch.__version__,
    }


def machine() -> str:
    """Return the name of the GPU, from a program: this process must not take memory of it."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return found[0] if found else "GPU"


def sides_of(row: str) -> list[str]:
    """Return the sides of a row.

    Torch's zero-bubble schedules run the backward of a block twice, which fails where the block is compiled:
    there the peer runs eagerly.
    """
    if not ROWS[row].peer:
        return ["piper"]
    return [EAGER, "piper"] if ROWS[row].schedule == "zbv" else ["peer", "piper"]


def run_rows(
    options: argparse.Namespace,
    task: Task,
    report: Report,
    sides: Mapping[str, ProcessSide],
    sides_of: Callable[[str], Sequence[str]],
) -> None:
    """Run the rows, the sides of each in turns, until the budget is spent."""
    end = time.monotonic() + options.budget
    try:
        for row in options.rows.split(","):
            chosen = options.sides.split(",") if options.sides else sides_of(row)
            for round_, side in itertools.product(range(options.rounds), chosen):
                left = end - time.monotonic()
                if left < LEAST:
                    print(f"the budget of {options.budget:.0f} s is spent at {row}", flush=True)
                    return
                one = replace(task, row=row, port=free_port(), compiled=task.compiled and side != EAGER)
                # The processes of the next side import torch while those of this one compile.
                for each in (sides[side], *sides.values()):
                    each.start()
                try:
                    report.add(one, side, round_, sides[side].run(one, min(left, PATIENCE)))
                except Failed as error:
                    report.fail(one, side, round_, str(error))
            report.compare(row, chosen)
    finally:
        for by in sides.values():
            by.close()


@contextmanager
def one_cache(folder: Path) -> Iterator[None]:
    """Let all processes keep what they compile in one folder."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    with set_for_children({name: str(folder / sub) for name, sub in names.items()}):
        yield


def arguments(
    parser: argparse.ArgumentParser, rows: Sequence[str], words: Sequence[str] | None, steps: int = 24
) -> argparse.Namespace:
    """Read the command line, of which `rows` are the default."""
    parser.add_argument("--rows", default=",".join(rows), help="with commas between them; all by default")
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides of a row take turns")
    parser.add_argument("--sides", default="", help="with commas between them; by default those of the row")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--eager", action="store_true", help="compile neither side")
    parser.add_argument("--by-layer", action=argparse.BooleanOptionalAction, help="a chunk for each layer")
    parser.add_argument("--profile", action="store_true", help="say where the time of rank 1 went")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which to stop")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "piper-ranks-cache")
    parser.add_argument("--out", type=Path, help="a file to which a line of JSON is added for each side")
    options = parser.parse_args(words)
    unknown = [row for row in options.rows.split(",") if row not in rows]
    if unknown:
        parser.error(f"there is no row {unknown[0]}: rows are {', '.join(rows)}")
    return options


@contextmanager
def started(options: argparse.Namespace, said: str) -> Iterator[tuple[Task, Report]]:
    """Prepare the machine for rows, and print what is run there."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and MPS end with this one
    task = Task(
        row="",
        size=options.size,
        steps=options.steps,
        device=options.device,
        cache=str(options.cache / "piper"),
        compiled=not options.eager,
        by_layer=options.by_layer,
        profile=options.profile,
    )
    gpu = shared_gpu() if options.device == "cuda" else nullcontext(False)
    with gpu as mps, one_cache(options.cache), set_for_children(NETWORK):
        facts = facts_of(options.device, mps)
        print(f"command: python -m {said}")
        print("".join(f"{name + ':':9}{fact}\n" for name, fact in facts.items()), flush=True)
        yield task, Report(facts=facts, out=options.out)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options = arguments(parser, [*ROWS], words)
    peer = side_of("peer")
    sides = {"peer": peer, EAGER: peer, "piper": side_of("piper")}
    said = "benchmarks.gpu_ranks " + " ".join(sys.argv[1:] if words is None else words)
    with started(options, said) as (task, report):
        run_rows(options, task, report, sides, sides_of)


if __name__ == "__main__":
    main()
