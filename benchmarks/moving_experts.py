"""Experts that move, under routing by Zipf's law: simulated on 8 GPUs, and run on 4 processes.

python benchmarks/moving_experts.py [--run] [--out FILE]

Rows of expert k are proportional to k ** -1.2, experts in a random order. Simulated: 64 experts over 8 H200,
whose speeds of kernels are those that `benchmarks/gpu_costs.py` measured on one
(`piper/simulate/clusters/h200.toml`). Run (`--run`): 16 experts over 4 processes, without clones and with
clones that `MoveExperts` places, in turns. Where ranks share cores, a step takes as long as all of them
compute together, so the CPU time of the busiest rank tells how long it takes on devices of their own.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

import piper
from piper import at, replicate, shard
from piper.compiler import compile
from piper.models import moe
from piper.plan.expert_table import ExpertTable, without_clones
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.routing import best_tables, routed_step
from piper.workers.local import LocalWorkerGroup

EXPONENT = 1.2
SEEDS = 5
DECODER = moe.Config(
    vocab=32768, dim=2048, layers=4, heads=16, kv_heads=16, head_dim=128, experts=64, top_k=2, hidden=4096,
    stages=1,
)  # fmt: skip
TOKENS, SAMPLES, DEVICES = 4096, 4, 8  # of a sample, samples of a device
WIDTH, HIDDEN, EXPERTS, ROWS, RANKS = 256, 512, 16, 4096, 4  # of the run


def zipf(experts: int, seed: int, rows: int = 1_000_000) -> list[int]:
    """Return the rows of each expert by Zipf's law, in a random order."""
    weights = [rank**-EXPONENT for rank in range(1, experts + 1)]
    random.Random(seed).shuffle(weights)
    return [round(rows * weight / sum(weights)) for weight in weights]


def simulated() -> Iterator[str]:
    """Yield the simulated step times: with even rows, with Zipf's, and with room for ever more clones."""
    tokens = torch.zeros(SAMPLES * DEVICES, TOKENS, dtype=torch.int64)
    costs = Roofline(load_cluster("h200"))
    even = [1000] * DECODER.experts
    lists = [zipf(DECODER.experts, seed) for seed in range(SEEDS)]
    alone: list[float] = []
    for clones in (0, 1, 2, 3, 4):
        job = piper.Job(
            model=partial(moe.MoEDecoder, DECODER),
            loss=moe.token_loss,
            data=lambda: [{"tokens": tokens, "labels": tokens}],
            strategy=[
                replicate(at(), devices=range(DEVICES), zero=1),
                shard(at(EP="*"), devices=range(DEVICES), clones=clones),
            ],
            precision="bf16",
        )
        program = compile(job, device="cpu")
        given = program.plans, program.outline, costs
        regions = [chunk.name for chunk in program.outline.chunks if chunk.kind == "expert"]
        home = dict.fromkeys(regions, without_clones(DEVICES, DECODER.experts // DEVICES, clones))
        if not clones:
            balanced = routed_step(*given, dict.fromkeys(regions, even), home).seconds
            alone = [routed_step(*given, dict.fromkeys(regions, rows), home).seconds for rows in lists]
            yield f"even rows                {balanced * 1e3:7.1f} ms"
            skews = [home[regions[0]].skew(rows) for rows in lists]
            yield f"Zipf, no clones          {statistics.mean(alone) * 1e3:7.1f} ms   busiest {show(skews)}"
            continue
        best = [best_tables(*given, dict.fromkeys(regions, rows)) for rows in lists]
        gains = [before / step.seconds for before, step in zip(alone, best, strict=True)]
        skews = [step.tables[regions[0]].skew(rows) for step, rows in zip(best, lists, strict=True)]
        yield (
            f"Zipf, room for {clones} clone{'s' if clones > 1 else ' '}   "
            f"{statistics.mean(step.seconds for step in best) * 1e3:7.1f} ms   busiest {show(skews)}   "
            f"{statistics.mean(gains):.2f}x ({min(gains):.2f} to {max(gains):.2f})"
        )


def show(skews: Sequence[float]) -> str:
    """Return how many rows the busiest device has, as a multiple of the mean."""
    return f"{statistics.mean(skews):.2f} of the mean"


class Mixture(nn.Module):
    """Two layers of experts, of which the batch says which one each row goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ParameterList(torch.randn(EXPERTS, WIDTH, HIDDEN) / 32 for _ in range(2))
        self.down = nn.ParameterList(torch.randn(EXPERTS, HIDDEN, WIDTH) / 32 for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        x = self.first(x)
        counts = nn.functional.one_hot(expert, EXPERTS).sum(0)
        order = expert.argsort(stable=True)
        back = order.argsort()
        for up, down in zip(self.up, self.down, strict=True):
            with piper.annotate("EP"):
                rows, received = piper.route(x[order], counts)
                rows = piper.grouped_mm(piper.grouped_mm(rows, up, received).relu(), down, received)
                rows = piper.unroute(rows, received, len(x))
            x = x + rows[back]
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean of squares."""
    result: Tensor = model(batch["x"], batch["expert"]).square().mean()
    return result


def batch() -> dict[str, Tensor]:
    """Return rows, and the expert of each by Zipf's law."""
    rng = torch.Generator().manual_seed(0)
    chances = torch.tensor(zipf(EXPERTS, 1), dtype=torch.float64)
    expert = torch.multinomial(chances, ROWS * RANKS, replacement=True, generator=rng)
    return {"x": torch.randn(ROWS * RANKS, WIDTH, generator=rng), "expert": expert}


def trained(clones: int, steps: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each step, the CPU seconds of each rank, and the busiest rank's share of rows.

    The first two steps do not count: experts are where the plan has them first, and memory is new.
    """
    given = batch()
    callbacks = [piper.callbacks.MoveExperts(every=1, costs="cpu")] if clones else []
    job = piper.Job(
        model=Mixture,
        loss=loss,
        data=lambda: [given],
        strategy=[replicate(at(), range(RANKS)), shard(at(EP="*"), range(RANKS), clones=clones)],
        callbacks=callbacks,
        steps=steps,
    )
    table = without_clones(RANKS, EXPERTS // RANKS, clones)
    rows = torch.bincount(given["expert"], minlength=EXPERTS).tolist()
    seconds: list[float] = []
    with piper.launch(compile(job, device="cpu"), on="local") as run:
        results = run.train()
        processes = cast(LocalWorkerGroup, run.session.group).processes.values()
        for number in range(steps):
            if number == 2:
                before = [cpu_seconds(process) for process in processes]
            began = time.perf_counter()
            next(results)
            seconds.append(time.perf_counter() - began)
        used = [cpu_seconds(p) - then for p, then in zip(processes, before, strict=True)]
        for experts, shares in run.expert_places().values():
            table = ExpertTable(experts=tuple(map(tuple, experts)), shares=tuple(map(tuple, shares)))
    return seconds[2:], [each / (steps - 2) for each in used], table.skew(rows)


def cpu_seconds(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ran(steps: int) -> Iterator[str]:
    """Yield the times of runs on 4 processes, without clones and with them, in turns."""
    first = 0.0
    found: dict[int, list[tuple[float, float, float, float]]] = {0: [], 2: []}
    for _ in range(2):
        for clones, kept in found.items():
            seconds, used, skew = trained(clones, steps)
            kept.append((statistics.median(seconds), max(used), sum(used), skew))
    for clones, kept in found.items():
        step, busiest, together, skew = (statistics.mean(column) for column in zip(*kept, strict=True))
        first = first or busiest
        yield (
            f"room for {clones} clones: busiest rank {skew:.2f} of the mean rows, "
            f"{busiest * 1e3:.0f} ms of CPU time a step ({first / busiest:.2f}x); "
            f"all ranks {together * 1e3:.0f} ms; step {step * 1e3:.0f} ms"
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", action="store_true", help="also run on 4 processes of this machine")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = [
        f"Zipf {EXPONENT}, {DECODER.experts} experts over {DEVICES} H200, simulated, mean of {SEEDS} orders:"
    ]
    for line in simulated():
        print(line, flush=True)
        lines.append(line)
    if asked.run:
        lines.append(f"\n{EXPERTS} experts over {RANKS} processes on CPUs, {ROWS} rows each:")
        for line in ran(asked.steps):
            print(line, flush=True)
            lines.append(line)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
