"""The same training by torch's own means: DDP, FSDP2, its 1F1B pipeline, and `parallelize_module`.

Both sides train the same decoder from the same weights on the same batch, in float32, in turns.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from piper.compiler import compile
from piper.directives import Directive, place, split
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder
from piper.models.causal import CausalDecoder, mean_cross_entropy, stage_ranges
from piper.models.layers import rope
from piper.run.launch import launch_local
from piper.runtime.accelerator import is_accelerator
from piper.runtime.worker import Options
from piper.schedules import one_f_one_b
from piper.selftest.rank_process import Processes, Rank
from piper.strategies import ddp, fsdp, tensor

SEED = 0
WARM = 2  # steps of each side before they are timed
Step = Callable[[], Tensor | None]  # trains a step, and returns the loss of this rank's samples, if it has it
Context = Callable[[], AbstractContextManager[object]]


class PeerStage(nn.Module):
    """Consecutive layers of a model: one stage of a pipeline, or all of them."""

    def __init__(
        self, model: CausalDecoder, index: int, stages: int, length: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        sizes = model.sizes
        self.blocks = nn.ModuleList(model.layers[i] for i in stage_ranges(sizes.layers, stages)[index])
        self.embedding = model.embedding if index == 0 else None
        last = index == stages - 1
        self.norm = model.norm if last else None
        self.head = model.head if last else None
        like = torch.empty((), dtype=dtype, device=model.head.weight.device)
        # No buffer, so that DDP does not make those of all ranks equal: each may have its own positions.
        self.rotation = rope(length, sizes.rotary, sizes.rope_base, like=like)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.rotation)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def layer_plan() -> dict[str, ParallelStyle]:
    """Return how the weights and values of a layer are divided, with sequence parallelism."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def parallelize(stage: PeerStage, mesh: DeviceMesh) -> None:
    """Divide a stage over a mesh, with sequence parallelism, as TorchTitan does."""
    ends: dict[str, ParallelStyle] = {}
    if stage.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        # A block that is compiled cannot take a value that has not arrived.
        stage.embedding.register_forward_hook(lambda module, given, out: out.clone())
    if stage.head is not None:
        ends["norm"] = SequenceParallel()
        ends["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))
    parallelize_module(stage, mesh, ends)
    for block in stage.blocks:
        parallelize_module(block, mesh, layer_plan())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What both sides train."""

    config: decoder.Config
    ranks: int
    samples: int  # in a batch
    length: int
    microbatches: int  # of a pipeline
    compiled: bool = False

    def batch(self) -> dict[str, Tensor]:
        """Return the batch of all steps, on the host."""
        rng = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.config.vocab, (self.samples, self.length + 1), generator=rng)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def stage(self, rank: Rank, index: int = 0, stages: int = 1) -> PeerStage:
        """Return a stage with the weights of the seed, its blocks compiled if both sides are."""
        torch.manual_seed(SEED)
        with rank.device:
            stage = PeerStage(decoder.Decoder(self.config), index, stages, self.length, torch.float32)
        for block in stage.blocks if self.compiled else ():
            block.compile(dynamic=False)
        return stage


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def whole_step(
    rank: Rank, module: nn.Module, batch: dict[str, Tensor], loss: Callable[[Tensor, Tensor], Tensor],
    context: Context = nullcontext,
) -> Step:  # fmt: skip
    """Return a step through a whole model: forward, backward, update."""
    optimizer = adamw(module.parameters())
    own = {name: value.to(rank.device) for name, value in batch.items()}

    def step() -> Tensor:
        with context():
            value = loss(module(own["tokens"]), own["labels"])
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def own_samples(training: Training, rank: Rank) -> dict[str, Tensor]:
    return {name: value.chunk(rank.size)[rank.number] for name, value in training.batch().items()}


def ddp_step(training: Training, rank: Rank) -> Step:
    """Return a step of a replica under DDP."""
    ids = [0] if is_accelerator(rank.device) else None
    module = DistributedDataParallel(training.stage(rank), device_ids=ids, gradient_as_bucket_view=True)
    return whole_step(rank, module, own_samples(training, rank), mean_cross_entropy)


def fsdp_step(training: Training, rank: Rank) -> Step:
    """Return a step of a shard under FSDP2, which gathers block by block."""
    stage = training.stage(rank)
    for block in stage.blocks:
        fully_shard(block)
    fully_shard(stage)
    return whole_step(rank, stage, own_samples(training, rank), mean_cross_entropy)


def tensor_step(training: Training, rank: Rank) -> Step:
    """Return a step of a rank of tensor and sequence parallelism."""
    stage, mesh = training.stage(rank), init_device_mesh(rank.device.type, (rank.size,))
    parallelize(stage, mesh)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:  # each rank has a part of the vocabulary
        flat = DTensor.from_local(logits.flatten(0, 1), mesh, [Shard(-1)], run_check=False)
        return cast(DTensor, nn.functional.cross_entropy(flat, labels.flatten())).to_local()

    return whole_step(rank, stage, training.batch(), loss, loss_parallel)


def pipeline_step(
    training: Training, rank: Rank, schedule: Callable[..., Any] = Schedule1F1B
) -> Step:  # torch's schedules have no common class
    """Return a step of a stage of torch's pipeline."""
    stage, config = training.stage(rank, rank.number, rank.size), training.config
    rows = training.samples // training.microbatches
    wide = partial(torch.empty, rows, training.length, device=rank.device, requires_grad=True)
    first, last = rank.number == 0, rank.number == rank.size - 1
    tokens = torch.zeros(rows, training.length, dtype=torch.long, device=rank.device)
    pipe = PipelineStage(
        stage, rank.number, rank.size, rank.device,
        input_args=(tokens if first else wide(config.dim),),
        output_args=(wide(config.vocab if last else config.dim),),
    )  # fmt: skip
    steps = schedule(pipe, training.microbatches, loss_fn=mean_cross_entropy)
    optimizer = adamw(stage.parameters())
    own = {name: value.to(rank.device) for name, value in training.batch().items()}

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given = [own["tokens"]] if first else []
        wanted = {"target": own["labels"], "losses": losses} if last else {}
        steps.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else None

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A way to train on several ranks: torch's, and the same as a strategy."""

    name: str
    title: str
    step: Callable[[Training, Rank], Step]
    strategy: Callable[[Training], list[Directive]]
    by_layer: bool = False  # our chunks are single layers
    staged: bool = False  # our regions are stages

    def job(self, training: Training) -> Job:
        """Return our side as a job."""
        stages = training.ranks if self.staged else 1
        config = replace(training.config, stages=stages, by_layer=self.by_layer)
        return Job(
            model=partial(decoder.Decoder, config),
            loss=decoder.token_loss,
            data=lambda: [training.batch()],
            strategy=self.strategy(training),
            optimizer=adamw,
            seed=SEED,
        )


def in_stages(training: Training, order: Callable[[int, int], Iterable[Directive]]) -> list[Directive]:
    """Return a pipeline with a stage on each rank."""
    ranks, parts = training.ranks, training.microbatches
    return [
        *(place(at(PP=rank), [rank]) for rank in range(ranks)), split(at(), parts=parts), *order(ranks, parts)
    ]  # fmt: skip


PEERS = (
    Peer(name="ddp", title="DistributedDataParallel", step=ddp_step, strategy=lambda t: ddp(t.ranks)),
    Peer(name="fsdp2", title="FSDP2", step=fsdp_step, strategy=lambda t: fsdp(t.ranks), by_layer=True),
    Peer(
        name="1f1b", title="Schedule1F1B", step=pipeline_step, strategy=partial(in_stages, order=one_f_one_b),
        staged=True,
    ),
    Peer(
        name="tp", title="parallelize_module", step=tensor_step,
        strategy=lambda t: tensor(t.config.layers, t.ranks, weights=decoder.SHARDED_WEIGHTS),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The seconds of steps of both sides, and how far their losses are apart."""

    ours: list[float]
    theirs: list[float]
    apart: float  # relative, the largest of all steps

    @property
    def ratio(self) -> float:
        """Return our median time over torch's."""
        return median(self.ours) / median(self.theirs)


def start_peer(rank: Rank, peer: Peer, training: Training) -> None:
    """Build a rank of torch's side."""
    on_gpu = is_accelerator(rank.device)
    dist.init_process_group(
        dist.get_default_backend_for_device(rank.device), store=PrefixStore("peer", rank.store),
        rank=rank.number, world_size=rank.size, device_id=rank.device if on_gpu else None,
    )  # fmt: skip
    rank.step = peer.step(training, rank)


def take_step(rank: Rank) -> float | None:
    """Take a step of torch's side. Return the loss of this rank's samples, if it has it."""
    assert rank.step is not None, "the peer is started"
    loss = rank.step()
    rank.wait()
    return None if loss is None else float(loss)


def end_peer(rank: Rank) -> None:
    rank.step = None
    dist.destroy_process_group()


def compare(peer: Peer, training: Training, rounds: int, processes: Processes) -> Comparison:
    """Train both sides in turns."""
    program = compile(peer.job(training), device=processes.kind, compile=training.compiled)
    meeting, batch = processes.meet(training.ranks, processes.bound), training.batch()
    times: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    options = Options(share="nccl", timeout=processes.bound)
    with launch_local(program, options, processes.forks) as run:
        processes.call(meeting, partial(start_peer, peer=peer, training=training))

        def theirs() -> float:
            answers = cast("list[float | None]", processes.call(meeting, take_step))
            known = [loss for loss in answers if loss is not None]
            return sum(known) / len(known)

        sides = (lambda: run.step(batch).loss, theirs)
        for number in range(WARM + rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                begin = perf_counter()
                losses[side].append(sides[side]())
                times[side].append(perf_counter() - begin)
        processes.call(meeting, end_peer)
    apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return Comparison(ours=times[0][WARM:], theirs=times[1][WARM:], apart=apart)
