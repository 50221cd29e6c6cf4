"""Expert parallelism of the peer of `gpu_ranks`: rows travel by `all_to_all_single`, as in TorchTitan."""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from piper.models.moe import SparseFeedForward


class ExpertsHere(nn.Module):
    """A layer's router, and those of its experts that this rank of a group has."""

    def __init__(self, whole: SparseFeedForward, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)
        self.top_k, self.router = whole.top_k, whole.router
        rank = dist.get_rank(group)
        self.gate_up = nn.Parameter(whole.gate_up.detach().chunk(self.ranks)[rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(self.ranks)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        counts = pairs.new_zeros(scores.shape[-1]).scatter_add_(0, pairs, torch.ones_like(pairs))
        rows = self.exchange(tokens[order // self.top_k], counts)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        summed = (rows[back].view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return cast(Tensor, summed.view(x.shape))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows, grouped by expert, to their experts, and bring back what these make of them."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_rank = torch.stack([counts, arriving]).view(2, self.ranks, -1).sum(-1)
        gives, gets = by_rank.tolist()
        arrived = all_to_all_single_autograd(rows, gets, gives, self.group)
        # Rows arrive by rank, then by expert, and are wanted by expert.
        experts = torch.arange(len(arriving), device=counts.device) % len(self.down)
        order = experts.repeat_interleave(arriving, output_size=sum(gets)).argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        made = self.compute(arrived[order], arriving.view(self.ranks, -1).sum(0))
        return all_to_all_single_autograd(made[back], gives, gets, self.group)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows."""
        gate, up = grouped(rows, self.gate_up, counts).chunk(2, dim=-1)
        return grouped(F.silu(gate) * up, self.down, counts)


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
