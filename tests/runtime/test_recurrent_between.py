"""Layers that work along the sequence, under sequence parallelism: they get all of it, with plain PyTorch's numbers."""

import torch
from torch import Tensor, nn

from piper import at, shard
from tests import plain
from tests.runtime.against_plain import difference


class Recurrent(nn.Module):
    """A feed-forward, then a causal convolution and a running sum over the sequence in two chunks, then another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ModuleList(nn.Linear(6, 8) for _ in "ab"),
            nn.ModuleList(nn.Linear(8, 6) for _ in "ab"),
        )
        self.conv = nn.Conv1d(6, 6, 3, groups=6, padding=2)
        self.gate = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down[0](self.up[0](x).relu())
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2) * self.gate(x).sigmoid()
        states = y.unflatten(1, (2, -1)).sum(2)
        before = torch.cat([torch.zeros_like(states[:, :1]), states], 1).cumsum(1)[:, :-1]
        x = x + y.cumsum(1) + before.repeat_interleave(x.shape[1] // 2, 1)
        result: Tensor = x + self.down[1](self.up[1](x).relu())
        return result


def loss(model: nn.Module, batch: plain.Batch) -> Tensor:
    result: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return result


def data(rows: int, seed: int) -> plain.Batch:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 4, 6, generator=draws) for name in "xy"}


def test_it_trains_as_in_plain_pytorch() -> None:
    weights = {"up.*.weight": 0, "down.*.weight": 1}
    strategy = [shard(at(), [0, 1], axis="TP", weights=weights, between=1)]
    assert difference(Recurrent, loss, data, strategy, rows=4) < 1e-11
