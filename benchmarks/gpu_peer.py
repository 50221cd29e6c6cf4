"""torch's PipelineStage and FSDP2, one rank by itself: the peer of `gpu.py`.

Its group moves no data. So that it computes on what training would, activations and gradients arrive as
random numbers and gathered parameters are written in full. Its network takes as long as that of Piper's rank.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from piper.models import decoder
from piper.models.causal import stage_ranges
from piper.models.layers import rope
from piper.plan.ops import Op
from piper.runtime.comm.synthetic import CopyEngine
from piper.simulate.cluster import load_cluster

Step = Callable[[], object]
LARGE = decoder.Config(
    vocab=151_936,
    dim=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=12_288,
    qk_norm=True,
    rope_base=1_000_000.0,
    stages=8,
)


class Network:
    """Keeps the peer's streams busy for as long as the links of a cluster would take.

    The same model and the same copies as for a rank of Piper. Transfers between stages take no time here.
    """

    def __init__(self, devices: Sequence[int], cluster: str = "h200") -> None:
        self.cluster, self.devices = load_cluster(cluster), tuple(devices)
        self.engine = CopyEngine(torch.device("cuda"))

    def occupy(self, op: Op, part: Tensor, written: int) -> None:
        """Take the time of a collective in which each member has one part, less that of bytes written."""
        sent = (len(self.devices) - 1) * part.nbytes
        takes = self.cluster.seconds(op, sent, self.devices) - self.engine.filling(written)
        self.engine(takes, outward=op == "reduce_scatter")


class OnNetwork:
    """A collective of FSDP2 that takes the time of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(OnNetwork, AllGather):
    """Writes gathered parameters in full, after the time of the network."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.network.occupy("gather", input_tensor, output_tensor.nbytes)
        parts = output_tensor.view(-1, input_tensor.numel())
        own = dist.get_rank(group)
        for part in [*parts[:own], *parts[own + 1 :]]:  # its own it has written itself
            part.copy_(input_tensor.view(-1))


class Scatters(OnNetwork, ReduceScatter):
    """Hands back a member's own part of the gradients, after the time of the network."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self.network.occupy("reduce_scatter", output_tensor, 0)
        output_tensor.copy_(input_tensor.view(-1, output_tensor.numel())[0].view_as(output_tensor))


def fused_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def master_step(params: list[Tensor], masters: list[Tensor], *, microbatches: int) -> Step:
    """Update float32 masters by gradients, and the parameters by the masters.

    The gradients of several microbatches are added up in float32, as Megatron does: behind each backward, in
    the gradient of the master.
    """
    optimizer = fused_adamw(masters)
    pairs = [*zip(masters, params, strict=True)]

    def add(parameter: Tensor, master: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    if microbatches > 1:
        for master, parameter in pairs:
            parameter.register_post_accumulate_grad_hook(functools.partial(add, master=master))

    def step() -> None:
        if microbatches == 1:
            for master, parameter in pairs:
                add(parameter, master)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def plain_step(params: Iterable[Tensor]) -> Step:
    """Update parameters that are float32 themselves, and cast where they compute."""
    optimizer = fused_adamw(params)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Stage(nn.Module):
    """One pipeline stage of the peer, of the same blocks."""

    def __init__(self, config: decoder.Config, index: int) -> None:
        super().__init__()
        layers = stage_ranges(config.layers, config.stages)[index]
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim) if index == 0 else None
        self.blocks = nn.ModuleList(decoder.block(config) for _ in layers)
        last = index == config.stages - 1
        self.norm = nn.RMSNorm(config.dim, eps=config.eps) if last else None
        self.head = nn.Linear(config.dim, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = rope(x.shape[1], self.config.rotary, self.config.rope_base, like=x)
        for block in self.blocks:
            x = block(x, rotation)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


@contextmanager
def peer_rank(
    stage: int, size: int, zero: int, parts: int, *, recompute: bool = False
) -> Iterator[tuple[Callable[[], Step], Network]]:
    """Yield what builds one rank of torch's PipelineStage + FSDP2, and its network.

    Its blocks are compiled. Products of the zeros or NaN that a group without data leaves behind run a fifth
    faster than those of any training: what arrives is random, and parameters and gradients are numbers.
    """
    from torch.distributed.pipelining import stage as pipelining
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = "_make_tensor_from_meta"
    empty = getattr(pipelining, name)

    def arrives(*args: object) -> Tensor:
        made: Tensor = empty(*args)
        return made.normal_() if made.is_floating_point() else made

    dist.init_process_group("fake", rank=4 * stage, world_size=32, store=FakeStore())
    setattr(pipelining, name, arrives)
    try:
        network = Network(range(4 * stage, 4 * stage + 4))
        make = functools.partial(peer_step, network, stage, size, zero, parts, recompute=recompute)
        yield make, network
    finally:
        setattr(pipelining, name, empty)
        dist.destroy_process_group()


def peer_step(network: Network, stage: int, size: int, zero: int, parts: int, *, recompute: bool) -> Step:
    """Build the peer's rank, inside the group that it runs on."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("pp", "dp"))
    with torch.device("cuda"):
        module: nn.Module = Stage(LARGE, stage)
    if recompute:
        module.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in module.blocks)  # type: ignore[union-attr]
    for block in module.blocks:  # type: ignore[union-attr]
        block.compile()  # before `fully_shard`, as TorchTitan does
    if zero >= 2:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in module.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero == 3)
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero == 3)
        for sharded in [*module.blocks, module]:  # type: ignore[misc]
            sharded.set_custom_all_gather(Gathers(network))
            sharded.set_custom_reduce_scatter(Scatters(network))
        apply_step = plain_step(module.parameters())
    else:
        masters = [parameter.detach().clone() for parameter in module.parameters()]
        module = module.bfloat16()
        apply_step = master_step(list(module.parameters()), masters, microbatches=parts)
    shape = (size, 1024) if stage == 0 else (size, 1024, LARGE.dim)
    kind = torch.long if stage == 0 else torch.bfloat16
    example = torch.empty(shape, dtype=kind, device="cuda", requires_grad=stage > 0)
    out = torch.empty((size, 1024, LARGE.dim), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    pipe = PipelineStage(
        module,
        stage,
        8,
        torch.device("cuda"),
        group=mesh.get_group("pp"),
        input_args=(example,),
        output_args=(out,),
    )
    schedule = Schedule1F1B(pipe, parts, loss_fn=cross_entropy)
    tokens = torch.randint(LARGE.vocab, (parts * size, 1024), device="cuda")

    def step() -> None:
        schedule.step(tokens) if stage == 0 else schedule.step()
        apply_step()

    return step


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
