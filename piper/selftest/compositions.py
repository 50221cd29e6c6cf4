"""Small jobs under composed strategies, compared with one device; and one whose worker is killed."""

import os
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import lcm
from time import perf_counter

import torch
from torch import Tensor

from piper.check.check import Report, check, numbers
from piper.check.reference import Reference
from piper.compiler import compile
from piper.directives import Directive, remat, shard
from piper.ir.select import at
from piper.job import Job
from piper.losses import IGNORED
from piper.models import decoder, moe
from piper.run.launch import launch_local
from piper.run.recovery import recovering
from piper.run.run_events import Event
from piper.runtime.worker import Options
from piper.schedules.grid import grid_for
from piper.strategies import Placing, copies, ddp, fsdp, over_ranks, tensor
from piper.strategies import moe as moe_strategy
from piper.workers.local import LocalWorkerGroup
from piper.workers.transport.fork_server import ForkServer

LAYERS, VOCAB = 4, 64
PARTS = 4  # microbatches
STEPS = 2  # that are compared
TOLERANCE = 1e-9  # relative, in float64
FIELDS = {"tokens": 1, "labels": 1}  # and the dimension of their positions
BEFORE, MOST = 2, 20  # steps before a worker is killed, and in all until it is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A strategy of a small decoder for some devices."""

    name: str
    strategy: Sequence[Directive]
    stages: int = 1
    experts: int = 0  # 0: a dense decoder
    clip: float | None = None

    def job(self, devices: int) -> Job:
        """Return it as a job in float64."""
        sparse = moe.Config.tiny(layers=LAYERS, stages=self.stages, experts=self.experts or 2)
        dense, by_layer = decoder.Config.tiny(layers=LAYERS, stages=self.stages), self.stages == 1
        return Job(
            model=partial(moe.MoEDecoder, replace(sparse, by_layer=by_layer))
            if self.experts
            else partial(decoder.Decoder, replace(dense, by_layer=by_layer)),
            loss=decoder.token_loss,
            data=lambda: batches(devices, STEPS),
            strategy=self.strategy,
            optimizer=momentum,
            precision="fp64",
            clip_norm=self.clip,
        )


def pipelined(name: str, schedule: str, width: int, *kinds: Placing, experts: int = 0) -> Composition:
    """Return a pipeline over two ranks of `width` devices."""
    grid = grid_for(schedule, 2, PARTS)
    strategy = over_ranks([range(s, s + 1) for s in range(grid.stages)], grid, width, *kinds, tag="PP")
    return Composition(name=name, strategy=strategy, stages=grid.stages, experts=experts)


def by(**degrees: int) -> str:
    """Return degrees of parallelism as text: `PP2 x DP4`."""
    return " x ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)


def compositions(devices: int) -> list[Composition]:
    """Return ten compositions. Those of two factors take pairs of devices, and leave an odd one out."""
    n, half = devices, devices // 2
    one, less, experts = Composition, [remat(at(), 0.25)], 2 * lcm(n, half)
    weights = decoder.SHARDED_WEIGHTS
    tp2 = partial(shard, ways=2, axis="TP", weights=weights, between=1)
    last = one(name="TP2, remat", strategy=[*tensor(LAYERS, 2, weights=weights), *less])
    if n > 3:
        last = pipelined(f"1F1B, {by(PP=2, TP=2, DP=n // 4)}", "1f1b", n // 4 * 2, copies(n // 4, 0), tp2)
    return [
        one(name=f"DP{n}", strategy=ddp(n, microbatches=2), clip=0.3),
        one(name=f"DP{n}, ZeRO-3", strategy=fsdp(n), clip=0.3),
        pipelined(f"1F1B, {by(PP=2, DP=half)}, ZeRO-1", "1f1b", half, copies(half, 1)),
        pipelined(f"interleaved 1F1B, {by(PP=2, DP=half)}, ZeRO-3", "interleaved-1f1b", half,
            copies(half, 3)),
        pipelined(f"zero bubble (ZBV), {by(PP=2, DP=half)}, ZeRO-2", "zbv", half, copies(half, 2)),
        pipelined(f"DualPipe-V, {by(PP=2, DP=half, EP=half)}, ZeRO-3", "dualpipe-v", half, copies(half, 3),
            partial(shard, ways=half), experts=experts),
        one(name=f"DP{n} x EP{n}, ZeRO-2", experts=experts, strategy=moe_strategy(LAYERS, n, zero=2)),
        one(name=f"{by(TP=2, DP=half)}, sequence parallelism, ZeRO-3, remat",
            strategy=[*tensor(LAYERS, 2, half, zero=3, weights=weights), *less]),
        last,
        one(name=f"CP{n}, ring attention",
            strategy=[shard(at(), range(n), axis="CP", batch=FIELDS, attention="ring")]),
    ]  # fmt: skip


def batches(devices: int, steps: int) -> list[dict[str, Tensor]]:
    """Return batches that every composition can divide. A position in eight has no label."""
    rng = torch.Generator().manual_seed(0)
    shape = (lcm(2 * devices, PARTS * (devices // 2)), 4 * devices)
    drawn: list[dict[str, Tensor]] = []
    for _ in range(steps):
        tokens, labels = (torch.randint(VOCAB, shape, generator=rng) for _ in range(2))
        labels[torch.rand(shape, generator=rng) < 1 / 8] = IGNORED
        drawn.append({"tokens": tokens, "labels": labels})
    return drawn


def momentum(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer whose updates follow the size of gradients."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def compared(composition: Composition, devices: int, kind: str, forks: ForkServer) -> Report:
    """Train a composition on processes and plain PyTorch on one device, and compare all numbers."""
    program, launch = compile(composition.job(devices), device=kind), partial(launch_local, forks=forks)
    return check(program, launch, batches(devices, STEPS), TOLERANCE, options=Options(share="nccl"))


def killed_and_recovered(devices: int, kind: str) -> dict[str, float]:
    """Train a pipeline of replicas, kill a worker in the middle of a step, and train on.

    Return the seconds from the signal to the end of the step and of an ordinary step, and the largest
    relative difference of a loss from one device.
    """
    victim, given = devices // 2, batches(devices, MOST)
    program = compile(compositions(devices)[2].job(devices), device=kind)
    events: list[Event] = []
    losses: list[float] = []
    ended: list[float] = []
    sent: list[float] = []

    def kill(pid: int) -> None:
        sent.append(perf_counter())
        os.kill(pid, signal.SIGKILL)

    with recovering(program, "local", Options(share="nccl"), retries=3, notify=events.append) as run:
        for step, batch in enumerate(given):
            if step == BEFORE:
                group = run.session.group
                assert isinstance(group, LocalWorkerGroup)
                pause = (ended[-1] - ended[-2]) / 2
                timer = threading.Timer(pause, kill, [group.processes[victim]])
                timer.start()
            losses.append(run.step(batch).loss)
            ended.append(perf_counter())
            if any(event.event == "recovery" for event in events) and len(losses) > BEFORE + 2:
                break
        timer.join()
    recovery = next((event for event in events if event.event == "recovery"), None)
    if recovery is None:
        raise RuntimeError(f"no recovery within {MOST} steps: {[event.what for event in events]}")
    wanted = [each.loss for each in numbers(Reference(program), islice(given, len(losses)))]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    over = next(end for end in ended if end > sent[0] + (recovery.seconds or 0.0))
    return {"recovered_s": over - sent[0], "step_s": ended[1] - ended[0], "difference": apart}
