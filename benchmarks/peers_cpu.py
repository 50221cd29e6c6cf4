"""Piper beside its peers on two CPU processes: the same model, batch, threads and optimizer, in one run.

Each side's processes stay alive and sleep while the other works; rounds alternate, so what else the machine
does hits both. A row gives the medians and their ratio: above 1 Piper is faster.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Protocol

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

import piper
from piper.models import decoder
from piper.models.causal import stage_ranges
from piper.models.layers import rope

CONFIG = decoder.Config(vocab=1024, dim=256, layers=8, heads=8, kv_heads=8, head_dim=32, hidden=640)
BATCH, LENGTH, MICROBATCHES, WORLD = 16, 128, 8, 2


def batch() -> dict[str, Tensor]:
    """The global batch that every side trains on."""
    tokens = torch.randint(CONFIG.vocab, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)  # type: ignore[arg-type]


def build(stages: int) -> decoder.Decoder:
    torch.manual_seed(0)
    return decoder.Decoder(replace(CONFIG, stages=stages))


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


def peer_single(_: int) -> Step:
    return whole_step(build(1), batch())


def my_rows(rank: int) -> dict[str, Tensor]:
    return {name: value.chunk(WORLD)[rank] for name, value in batch().items()}


def peer_ddp(rank: int) -> Step:
    return whole_step(DistributedDataParallel(build(1)), my_rows(rank))


def peer_fsdp(rank: int) -> Step:
    model = build(1)
    for layer in model.layers:
        fully_shard(layer)
    return whole_step(fully_shard(model), my_rows(rank))


def peer_pipeline(rank: int, zero_bubble: bool) -> Step:
    module = Stage(build(1), rank, WORLD)
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


PEERS: dict[str, tuple[int, Callable[[int], Step]]] = {
    "single": (1, peer_single),
    "ddp": (WORLD, peer_ddp),
    "fsdp2": (WORLD, peer_fsdp),
    "1f1b": (WORLD, lambda rank: peer_pipeline(rank, zero_bubble=False)),
    "zero-bubble": (WORLD, lambda rank: peer_pipeline(rank, zero_bubble=True)),
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

    def __init__(self, name: str) -> None:
        world, _ = PEERS[name]
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=peer_main, args=(name, rank, world, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(120), "a peer did not start"
            pipe.recv()

    def step(self) -> None:
        for pipe in self.pipes:
            pipe.send("step")
        for pipe in self.pipes:
            assert pipe.poll(120), "a peer did not answer"
            pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("end")
        for process in self.processes:
            process.join(20)
            process.kill()


def peer_main(name: str, rank: int, world: int, port: int, pipe: Connection) -> None:
    """One process of a peer."""
    torch.set_num_threads(1)
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    step = PEERS[name][1](rank)
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
def sides(name: str) -> Iterator[tuple[Side, Side]]:
    peer = PeerSide(name)
    try:
        with piper.launch(piper.compile(ours(name)), on="local") as run:
            yield OurSide(run), peer
    finally:
        peer.close()


def compare(name: str, rounds: int) -> tuple[float, float]:
    """The median seconds of a step, ours and the peer's, from alternating rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    with sides(name) as both:
        for side in both:
            for _ in range(2):
                side.step()
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                both[index].step()
                times[index].append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print(f"{'against':12} {'piper':>10} {'peer':>10} {'peer / piper':>13}")
    for name in options.names or PEERS:
        mine, theirs = compare(name, options.rounds)
        print(f"{name:12} {mine * 1e3:7.0f} ms {theirs * 1e3:7.0f} ms {theirs / mine:12.2f}x", flush=True)


if __name__ == "__main__":
    main()
