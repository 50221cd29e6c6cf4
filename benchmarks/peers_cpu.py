"""Piper beside its peers on two CPU processes: the same model, batch, threads and optimizer, in one run.

Each side's processes stay alive and sleep while the other works; rounds alternate, so what else the machine
does hits both. Both sides are compiled with Inductor: the peer's blocks before they are wrapped or sharded,
as TorchTitan does, and our chunks. `--eager` compiles neither. Tokens are random, and what travels between
processes is what was computed. A row gives the median and the fastest step of each side, and the ratio of the
medians: above 1 Piper is faster. Leave the machine alone meanwhile.
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

import piper
from piper.models import decoder
from piper.models.causal import stage_ranges
from piper.models.layers import rope

CONFIG = decoder.Config(vocab=1024, dim=256, layers=8, heads=8, kv_heads=8, head_dim=32, hidden=640)
BATCH, LENGTH, MICROBATCHES, WORLD = 16, 128, 8, 2
PATIENCE = 600  # seconds: a first step compiles


def batch() -> dict[str, Tensor]:
    """The global batch that every side trains on."""
    tokens = torch.randint(CONFIG.vocab, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)  # type: ignore[arg-type]


def build(*, compiled: bool) -> decoder.Decoder:
    """Return the peer's model, its blocks compiled as its users compile them."""
    torch.manual_seed(0)
    model = decoder.Decoder(CONFIG)
    if compiled:
        for layer in model.layers:
            layer.compile()
    return model


class Stage(nn.Module):
    """The layers of one pipeline stage, for the peer."""

    def __init__(self, model: decoder.Decoder, index: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == stages - 1
        self.layers = nn.ModuleList(model.layers[i] for i in stage_ranges(CONFIG.layers, stages)[index])
        self.embedding = model.embedding if self.first else None
        self.norm, self.head = (model.norm, model.head) if self.last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = rope(x.shape[1], CONFIG.head_dim, CONFIG.rope_base, like=x)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


Step = Callable[[], None]


def whole_step(model: nn.Module, mine: dict[str, Tensor]) -> Step:
    """A plain step: forward, backward, update."""
    optimizer = adamw(model.parameters())

    def step() -> None:
        decoder.loss(model, mine).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def peer_single(_: int, compiled: bool) -> Step:
    return whole_step(build(compiled=compiled), batch())


def my_rows(rank: int) -> dict[str, Tensor]:
    return {name: value.chunk(WORLD)[rank] for name, value in batch().items()}


def peer_ddp(rank: int, compiled: bool) -> Step:
    return whole_step(DistributedDataParallel(build(compiled=compiled)), my_rows(rank))


def peer_fsdp(rank: int, compiled: bool) -> Step:
    model = build(compiled=compiled)
    for layer in model.layers:
        fully_shard(layer)
    return whole_step(fully_shard(model), my_rows(rank))


def peer_pipeline(rank: int, compiled: bool, *, zero_bubble: bool) -> Step:
    if zero_bubble:  # which goes through the graph of a compiled block twice, as torch's own message says
        functorch_config.donated_buffer = False
    module = Stage(build(compiled=compiled), rank, WORLD)
    rows = BATCH // MICROBATCHES
    example = torch.zeros(rows, LENGTH, dtype=torch.long)
    hidden = torch.zeros(rows, LENGTH, CONFIG.dim, requires_grad=True)
    logits = torch.zeros(rows, LENGTH, CONFIG.vocab, requires_grad=True)
    stage = PipelineStage(
        module,
        rank,
        WORLD,
        torch.device("cpu"),
        input_args=(example if rank == 0 else hidden,),
        output_args=(hidden if rank == 0 else logits,),
    )
    kind = ScheduleInterleavedZeroBubble if zero_bubble else Schedule1F1B
    stages = [stage] if zero_bubble else stage
    schedule = kind(stages, MICROBATCHES, loss_fn=lambda out, labels: decoder_loss(out, labels))  # type: ignore[arg-type]
    optimizer = adamw(module.parameters())
    full = batch()

    def step() -> None:
        if rank == 0:
            schedule.step(full["tokens"], return_outputs=False)
        else:
            schedule.step(target=full["labels"], losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decoder_loss(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


PEERS: dict[str, tuple[int, Callable[[int, bool], Step]]] = {
    "single": (1, peer_single),
    "ddp": (WORLD, peer_ddp),
    "fsdp2": (WORLD, peer_fsdp),
    "1f1b": (WORLD, functools.partial(peer_pipeline, zero_bubble=False)),
    "zero-bubble": (WORLD, functools.partial(peer_pipeline, zero_bubble=True)),
}


def ours(name: str) -> piper.Job:
    """The same work as a job."""
    both = range(WORLD)
    everything = piper.at()
    stages, strategy = 1, list[piper.Directive]()
    match name:
        case "ddp":
            strategy = [piper.replicate(everything, both)]
        case "fsdp2":
            stages, strategy = CONFIG.layers, [piper.replicate(everything, both, zero=3)]
        case "1f1b" | "zero-bubble":
            stages = WORLD
            build_order = piper.schedules.one_f_one_b if name == "1f1b" else piper.schedules.zero_bubble
            strategy = [
                *(piper.place(piper.at(PP=rank), rank) for rank in both),
                piper.split(everything, parts=MICROBATCHES),
                *build_order(WORLD, MICROBATCHES),
            ]
    return piper.Job(
        model=lambda: decoder.Decoder(replace(CONFIG, stages=stages)),
        loss=decoder.token_loss,
        data=lambda: [batch()],
        strategy=strategy,
        optimizer=adamw,
    )


class Side(Protocol):
    """One side of a comparison."""

    def step(self) -> None: ...


class PeerSide:
    """The peer's processes, asleep until asked for a step."""

    def __init__(self, name: str, *, compiled: bool) -> None:
        world, _ = PEERS[name]
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            about = (name, rank, world, port, compiled, there)
            process = context.Process(target=peer_main, args=about, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE), "a peer did not start"
            pipe.recv()

    def step(self) -> None:
        for pipe in self.pipes:
            pipe.send("step")
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE), "a peer did not answer"
            pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join(20)
            process.kill()


def peer_main(name: str, rank: int, world: int, port: int, compiled: bool, pipe: Connection) -> None:
    """One process of a peer."""
    torch.set_num_threads(1)
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    step = PEERS[name][1](rank, compiled)
    pipe.send("ready")
    while pipe.recv() == "step":
        step()
        pipe.send("done")
    if world > 1:
        dist.destroy_process_group()


class OurSide:
    """A launched program, given the same batch each step."""

    def __init__(self, run: "piper.Run") -> None:
        self.run, self.batch = run, batch()

    def step(self) -> None:
        self.run.step(self.batch)


@contextlib.contextmanager
def sides(name: str, *, compiled: bool) -> Iterator[tuple[Side, Side]]:
    peer = PeerSide(name, compiled=compiled)
    try:
        with piper.launch(piper.compile(ours(name), compile=compiled), on="local") as run:
            yield OurSide(run), peer
    finally:
        peer.close()


def compare(name: str, rounds: int, *, compiled: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of steps, ours and the peer's, from alternating rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    with sides(name, compiled=compiled) as both:
        for side in both:
            for _ in range(2):
                side.step()
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                both[index].step()
                times[index].append(time.perf_counter() - begin)
    return times


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--eager", action="store_true", help="compile neither side")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print(heading(options.eager))
    print(f"{'against':12} {'piper':>10} {'fastest':>10} {'peer':>10} {'fastest':>10} {'peer / piper':>13}")
    for name in options.names or PEERS:
        mine, theirs = compare(name, options.rounds, compiled=not options.eager)
        medians = statistics.median(mine), statistics.median(theirs)
        cells = (medians[0], min(mine), medians[1], min(theirs))
        figures = " ".join(f"{seconds * 1e3:7.0f} ms" for seconds in cells)
        print(f"{name:12} {figures} {medians[1] / medians[0]:12.2f}x", flush=True)


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
