"""The peer of `gpu_ranks`: torch's own way to train each row, as one of four ranks.

It begins with the weights that Piper draws for the seed. Types are those of Piper: computation in bf16,
weights, sums of gradients over microbatches, reductions and the optimizer in float32. Blocks and the loss are
compiled, as TorchTitan does, blocks before they are sharded. Losses are divided so that gradients are sums.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch._functorch import config as functorch_config
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.ranks_experts import ExpertsHere
from benchmarks.ranks_rows import RANKS, SEED, Batch, Row, Shape, Size, adamw, batch_of, model_of
from piper.models.moe import SparseFeedForward
from piper.selftest.peers import PeerStage, parallelize


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of a row: its number, its meshes, and what both sides agree on."""

    row: Row
    size: Size
    rank: int
    mesh: DeviceMesh  # (pp, inner): inner is data, tensor or context parallelism
    device: str
    compiled: bool

    @property
    def shape(self) -> Shape:
        return self.size.shapes[self.row.name]

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (RANKS // self.row.pp)

    @property
    def inner(self) -> DeviceMesh:
        return self.mesh["inner"]

    @property
    def inner_rank(self) -> int:
        return self.rank % (RANKS // self.row.pp)

    @property
    def fraction(self) -> float:
        """Return by what the mean loss of one microbatch is multiplied before its backward."""
        whole = 1 if self.row.zero else self.row.dp * self.row.cp  # FSDP2 takes means over replicas itself
        return 1 / (self.shape.microbatches * whole)

    def batch(self) -> Batch:
        """Return this rank's samples, or its positions of them."""
        batch = batch_of(self.row, self.shape)
        if self.row.dp > 1:
            batch = {name: value.chunk(self.row.dp)[self.inner_rank] for name, value in batch.items()}
        return {name: value.to(self.device) for name, value in batch.items()}


class Trained:
    """Updates parameters by float32 sums of their gradients.

    Parameters in bf16 have a float32 copy each, which is updated and copied back. Others are updated
    themselves.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, microbatches: int) -> None:
        """Take float32 copies of a module's parameters, and turn it into another type."""
        if dtype == torch.float32:
            self.params = [*module.parameters()]
            self.values = self.masters = [local(param.detach()) for param in self.params]
        else:
            self.masters = [local(param.detach()).clone() for param in module.parameters()]
            self.params = [*module.to(dtype).parameters()]
            self.values = [local(param.detach()) for param in self.params]
        self.pairs = {id(param): master for param, master in zip(self.params, self.masters, strict=True)}
        self.copies = dict.fromkeys(self.pairs, 1)  # how many ranks have the same values
        self.sums: dict[int, Tensor] = {}  # of gradients, over the microbatches so far
        self.layouts: dict[int, tuple[Placement, ...]] = {}  # of those
        self.summed: dict[int, dist.ProcessGroup] = {}  # over which the gradient of a parameter is summed
        self.done: set[int] = set()  # parameters of which DDP sums the gradients
        self.optimizer = adamw(self.masters)
        if microbatches > 1:
            for param in self.params:
                param.register_post_accumulate_grad_hook(self.add)

    def add(self, param: Tensor) -> None:
        """Add a gradient of one microbatch to the sum, and drop it."""
        grad, param.grad = param.grad, None
        if grad is None or id(param) in self.done:
            return
        if isinstance(grad, DTensor):
            self.layouts[id(param)] = grad.placements
        own = local(grad)
        if id(param) in self.sums:
            self.sums[id(param)].add_(own)
        else:
            self.sums[id(param)] = own.float()

    def reduce(self) -> None:
        """Add the gradients that are not added yet, and sum them over ranks, those of a group at once."""
        groups: dict[dist.ProcessGroup, list[Tensor]] = {}
        for param in self.params:
            self.add(param)
            if id(param) in self.done:
                continue
            total = self.sums.pop(id(param))
            if isinstance(param, DTensor) and self.layouts[id(param)] != param.placements:
                if all(placement.is_replicate() for placement in param.placements):
                    groups.setdefault(param.device_mesh.get_group(), []).append(total)
                else:  # the table's, in which each rank has terms of all rows
                    terms = DTensor.from_local(
                        total, param.device_mesh, self.layouts[id(param)], run_check=False
                    )
                    total = terms.redistribute(placements=param.placements).to_local()
            if id(param) in self.summed:
                groups.setdefault(self.summed[id(param)], []).append(total)
            self.pairs[id(param)].grad = total
        for group, grads in groups.items():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def gradient(self, param: Tensor) -> Tensor:
        """Return this rank's part of the summed gradient of a parameter."""
        return cast(Tensor, self.pairs[id(param)].grad)

    def squares(self) -> Tensor:
        """Return this rank's part of the squared norm of the gradient: in all, each value counts once."""
        terms = [
            self.gradient(param).double().square().sum() / self.copies[id(param)] for param in self.params
        ]
        return torch.stack(terms).sum()

    def update(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not self.values:
            torch._foreach_copy_(self.values, self.masters)


class TrainedShards:
    """Updates the float32 shards of FSDP2."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params = [*params]
        self.optimizer = adamw(self.params)

    def reduce(self) -> None:
        """Do nothing: FSDP2 has reduced the gradients in the backward."""

    def squares(self) -> Tensor:
        """Return this rank's part of the squared norm of the gradient."""
        grads = [local(cast(Tensor, param.grad)) for param in self.params]
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()

    def update(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def local(value: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return value.to_local() if isinstance(value, DTensor) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRank:
    """One rank of the peer: what computes gradients and returns its part of the loss, and what updates."""

    backward: Callable[[], Tensor]
    trained: Trained | TrainedShards
    device: str

    def step(self, *, with_norm: bool = False) -> tuple[float, float]:
        """Train one step. Return the loss of the whole batch and, if asked for, the norm of its gradient."""
        loss = self.backward()
        self.trained.reduce()
        squares = self.trained.squares() if with_norm else torch.zeros(())
        self.trained.update()
        sums = torch.stack([loss.detach().double().to(self.device), squares.double().to(self.device)])
        dist.all_reduce(sums)
        total, square = sums.tolist()
        return total, square**0.5


@contextmanager
def peer_rank(row: Row, size: Size, rank: int, device: str, *, compiled: bool) -> Iterator[PeerRank]:
    """Build a rank of the peer, inside the group of all four."""
    mesh = init_device_mesh(device, (row.pp, RANKS // row.pp), mesh_dim_names=("pp", "inner"))
    place = Place(row=row, size=size, rank=rank, mesh=mesh, device=device, compiled=compiled)
    functorch_config.donated_buffer = row.schedule != "zbv"  # which goes through a compiled block twice
    stages = own_stages(place)
    with ExitStack() as stack:
        if row.pp > 1:
            yield pipeline_rank(place, stages)
        elif row.zero:
            yield sharded_rank(place, stages[0])
        elif row.tp > 1:
            yield tensor_rank(place, stages[0])
        else:
            yield replicated_rank(place, stages[0], stack)


def own_stages(place: Place) -> list[PeerStage]:
    """Return this rank's stages with the weights of the seed, their blocks compiled.

    Ranks build the whole model one after another: together they would need four times its memory.
    """
    row, shape = place.row, place.shape
    stages: list[PeerStage] = []
    for turn in range(RANKS):
        if turn == place.rank:
            torch.manual_seed(SEED)
            with torch.device(place.device):
                model = model_of(shape.model)
            if row.ep > 1:
                for block in model.layers:
                    block.ffn = ExpertsHere(cast(SparseFeedForward, block.ffn), place.inner.get_group())
            own = row.stages_of(place.pipeline_rank)
            stages = [PeerStage(model, index, row.stages, shape.length, place.size.dtype) for index in own]
            del model
            if place.device == "cuda":
                torch.cuda.empty_cache()
        dist.barrier()
    for stage in stages:
        if row.tp > 1:
            parallelize(stage, place.inner)
        for block in stage.blocks:
            prepare_block(place, block)
    return stages


def prepare_block(place: Place, block: nn.Module) -> None:
    """Let a block save its inputs alone, where its row says so, and compile it."""
    if place.row.recompute:
        block.forward = functools.partial(recomputed, block.forward)
    if place.compiled:
        block.compile(dynamic=False)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function that saves its inputs alone, and is called again by the backward."""
    return cast(Tensor, checkpoint(function, *inputs, use_reentrant=False))


def loss_of(place: Place) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a microbatch: its mean cross entropy, times its part of the whole batch."""
    fraction, mesh = place.fraction, place.inner

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) * fraction

    def divided_loss(logits: Tensor, labels: Tensor) -> Tensor:  # each rank has a part of the vocabulary
        flat = DTensor.from_local(logits.flatten(0, 1).float(), mesh, [Shard(-1)], run_check=False)
        return local(F.cross_entropy(flat, labels.flatten())) * fraction

    if place.row.tp > 1:
        return divided_loss
    return torch.compile(loss, dynamic=False) if place.compiled else loss


def whole_backward(
    place: Place, module: nn.Module, batch: Batch, context: Callable[[], AbstractContextManager[object]]
) -> Callable[[], Tensor]:
    """Return what computes the gradients of one microbatch through a whole model."""
    loss = loss_of(place)
    copies = place.row.tp * (place.row.dp if place.row.zero else 1)  # that return the same part of the loss

    def backward() -> Tensor:
        with context():
            logits = module(batch["tokens"])
            value = loss(logits, batch["labels"])
            del logits  # its memory is the backward's
            value.backward()
        return value.detach() / copies

    return backward


# data and context parallelism


def replicated_rank(place: Place, stage: PeerStage, stack: ExitStack) -> PeerRank:
    """Return a rank of DDP, in which experts or attention may reach over the ranks."""
    trained = Trained(stage, place.size.dtype, 1)
    apart = [name for name, _ in stage.named_parameters() if place.row.ep > 1 and is_expert(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, apart)
    ranks = [0] if place.device == "cuda" else None
    module = DistributedDataParallel(stage, device_ids=ranks, gradient_as_bucket_view=True)
    module.register_comm_hook(trained, sum_in_float32)
    for name, param in stage.named_parameters():
        if name not in apart:
            trained.done.add(id(param))
            trained.copies[id(param)] = RANKS
    batch = place.batch()
    if place.row.cp > 1:
        stack.enter_context(attention_over_ranks(place, stage, batch))
    backward = whole_backward(place, module, batch, nullcontext)
    return PeerRank(backward=backward, trained=trained, device=place.device)


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to experts."""
    return name.endswith((".gate_up", "ffn.down"))


def sum_in_float32(trained: Trained, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over all ranks in float32, as gradients of what is updated."""
    buffer, params = bucket.buffer(), bucket.parameters()
    wide = buffer.float()  # the buffer itself where it is float32
    future = dist.all_reduce(wide, async_op=True).get_future()

    def keep(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        parts = wide.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            trained.pairs[id(param)].grad = part.view(param.shape)
        return buffer

    return cast("torch.futures.Future[Tensor]", future.then(keep))


@contextmanager
def attention_over_ranks(place: Place, stage: PeerStage, batch: Batch) -> Iterator[None]:
    """Give this rank its positions of the batch, and let its attention reach all of them.

    On GPUs this is torch's `context_parallel`: ring attention, positions balanced over the ranks. It has no
    attention for the host, where keys and values are gathered instead.
    """
    buffers = [batch["tokens"], batch["labels"], stage.rotation]
    if place.device == "cuda":
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(place.inner, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            yield
        return
    for buffer in buffers:
        part = buffer.chunk(RANKS, 1)[place.rank].clone()
        buffer.resize_(part.shape).copy_(part)
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functools.partial(gathered_attention, plain, place.rank)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def gathered_attention(
    plain: Callable[..., Tensor],
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """Attend to the keys and values of all ranks up to the own positions."""
    assert is_causal
    world = dist.group.WORLD
    assert world is not None
    keys, values = (all_gather_tensor_autograd(x.contiguous(), 2, world) for x in (k, v))
    own = torch.arange(q.shape[2]) + rank * q.shape[2]
    mask = own[:, None] >= torch.arange(keys.shape[2])
    return plain(q, keys, values, attn_mask=mask, enable_gqa=enable_gqa)


def sharded_rank(place: Place, stage: PeerStage) -> PeerRank:
    """Return a rank of FSDP2."""
    shard_stage(place, stage)
    backward = whole_backward(place, stage, place.batch(), nullcontext)
    return PeerRank(backward=backward, trained=TrainedShards(stage.parameters()), device=place.device)


def shard_stage(place: Place, stage: PeerStage) -> None:
    """Shard a stage as TorchTitan does: the table, each block, the norm with the head."""
    policy = MixedPrecisionPolicy()
    if place.size.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    again = place.row.zero == 3
    shard = functools.partial(fully_shard, mesh=place.inner, mp_policy=policy)
    if stage.embedding is not None:
        shard(stage.embedding, reshard_after_forward=again)
    for block in stage.blocks:
        shard(block, reshard_after_forward=again)
    if stage.norm is not None and stage.head is not None:
        # Its backward follows at once, so without a pipeline it stays gathered.
        shard([stage.norm, stage.head], reshard_after_forward=again and place.row.pp > 1)
    shard(stage, reshard_after_forward=again)


# tensor parallelism


def tensor_rank(place: Place, stage: PeerStage) -> PeerRank:
    """Return a rank of tensor and sequence parallelism."""
    trained = Trained(stage, place.size.dtype, 1)
    count_copies(trained)
    backward = whole_backward(place, stage, place.batch(), loss_parallel)
    return PeerRank(backward=backward, trained=trained, device=place.device)


def count_copies(trained: Trained) -> None:
    """Note which parameters every rank of a tensor-parallel group has whole."""
    for param in trained.params:
        if isinstance(param, DTensor) and all(placement.is_replicate() for placement in param.placements):
            trained.copies[id(param)] = param.device_mesh.size()


# pipelines


def pipeline_rank(place: Place, stages: Sequence[PeerStage]) -> PeerRank:
    """Return a rank of a pipeline, whose stages may be sharded, divided, or share experts."""
    row, microbatches = place.row, place.shape.microbatches
    trained: Trained | TrainedShards
    if row.zero:
        for stage in stages:
            shard_stage(place, stage)
        trained = TrainedShards(param for stage in stages for param in stage.parameters())
    else:
        both = nn.ModuleList(stages)
        trained = Trained(both, place.size.dtype, microbatches)
        count_copies(trained)
        if row.dp > 1:
            for name, param in both.named_parameters():
                if not is_expert(name):
                    trained.summed[id(param)] = place.inner.get_group()
                    trained.copies[id(param)] = row.dp
    indices = row.stages_of(place.pipeline_rank)
    pipes = [pipeline_stage(place, stage, index) for stage, index in zip(stages, indices, strict=True)]
    if isinstance(trained, Trained):
        for pipe in pipes:
            add_weight_gradients(pipe, trained)
    schedule = schedule_of(place, pipes)
    batch = place.batch()
    first, last = 0 in indices, row.stages - 1 in indices
    context = loss_parallel if row.tp > 1 else nullcontext
    copies = row.tp * (row.dp if row.zero else 1)

    def backward() -> Tensor:
        losses: list[Tensor] = []
        given = [batch["tokens"]] if first else []
        wanted = {"target": batch["labels"], "losses": losses} if last else {}
        with context():
            schedule.step(*given, **wanted, return_outputs=False)
        return torch.stack(losses).sum() / copies if losses else torch.zeros(())

    return PeerRank(backward=backward, trained=trained, device=place.device)


def pipeline_stage(place: Place, stage: PeerStage, index: int) -> PipelineStage:
    """Return torch's stage, with the shapes of what it takes and returns."""
    row, shape = place.row, place.shape
    hidden = (shape.samples, shape.length // row.tp, shape.model.dim)
    logits = (shape.samples, shape.length, shape.model.vocab // row.tp)
    wide = functools.partial(torch.empty, dtype=place.size.dtype, device=place.device, requires_grad=True)
    tokens = torch.zeros(hidden[0], shape.length, dtype=torch.long, device=place.device)
    return PipelineStage(
        stage,
        index,
        row.stages,
        torch.device(place.device),
        input_args=(tokens if index == 0 else wide(hidden),),
        output_args=(wide(logits if index == row.stages - 1 else hidden),),
        group=place.mesh["pp"].get_group(),
    )


def add_weight_gradients(pipe: PipelineStage, trained: Trained) -> None:
    """Add up gradients of weights that a zero-bubble schedule computes apart: no hook sees those."""
    plain = pipe.backward_weight_one_chunk

    def added(microbatch: int, last_backward: bool = False) -> None:
        plain(microbatch, last_backward)
        for param in pipe.submod.parameters():
            trained.add(param)

    pipe.backward_weight_one_chunk = added  # type: ignore[method-assign, assignment]


def schedule_of(place: Place, pipes: list[PipelineStage]) -> Any:  # noqa: ANN401  torch's have no common class
    """Return torch's schedule of a row."""
    options: dict[str, Any] = {
        "n_microbatches": place.shape.microbatches,
        "loss_fn": loss_of(place),
        "scale_grads": False,
    }
    match place.row.schedule:
        case "interleaved":
            return ScheduleInterleaved1F1B([*pipes], **options)
        case "zbv":
            return ScheduleZBVZeroBubble([*pipes], **options)
    return Schedule1F1B(pipes[0], **options)
