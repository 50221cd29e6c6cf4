"""A training with FSDP2 and torch.distributed.checkpoint, without a word about Piper.

fsdp2_peer.py RANK FOLDER train            six steps; saves after two, in three forms; writes losses
fsdp2_peer.py RANK FOLDER continue NAME    loads what another program saved after four steps; two steps more
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

WORLD, ROWS, WIDTH, STEPS = 2, 8, 6, 6
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """A layer with a matrix, biases and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * self.scale


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def adamw(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """AdamW with two groups: biases and norms have no weight decay."""
    pairs = [*named]
    matrices = [p for name, p in pairs if p.dim() > 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for _, p in pairs if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.05,
    )


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def batches() -> Iterator[dict[str, Tensor]]:
    """Global batches, the same in every program."""
    draws = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=draws, dtype=torch.float64)
        yield {"x": x, "y": torch.randint(3, (ROWS,), generator=draws)}


def trained(rank: int, model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> Iterator[float]:  # noqa: ANN401
    """Train on this rank's rows of some batches; yield the loss of each global batch."""
    for batch in [*batches()][steps.start : steps.stop]:
        rows = slice(rank * ROWS // WORLD, (rank + 1) * ROWS // WORLD)
        loss = nn.functional.cross_entropy(model(batch["x"][rows]), batch["y"][rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach() / WORLD
        dist.all_reduce(mean)
        yield mean.item()


def build() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Net().double()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model.named_parameters())
    return model, optimizer, warmup(optimizer)


def save(rank: int, folder: Path, model: nn.Module, optimizer: Any, step: int) -> None:  # noqa: ANN401
    """Save as the tutorials of torch do, as TorchTitan does, and as one file."""
    weights, state = get_state_dict(model, optimizer)
    dcp_save({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp2")
    titan: dict[str, Any] = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "train_state": {"step": step, "ntokens_seen": 0},
        "lr_scheduler": {"last_epoch": step},
    }
    dcp_save(titan, checkpoint_id=folder / "titan")
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": whole[0], "optimizer": whole[1], "step": step}, folder / "whole.pt")


def load(folder: Path, name: str, model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    if name == "torchtitan":
        flat: dict[str, Any] = {
            **get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        }
        flat |= {"train_state": {"step": 0, "ntokens_seen": 0}, "lr_scheduler": {"last_epoch": 0}}
        dcp_load(flat, checkpoint_id=folder / name)
        assert flat["train_state"]["step"] == flat["lr_scheduler"]["last_epoch"] == 4
        set_optimizer_state_dict(model, optimizer, flat.pop("optimizer"), options=FLAT)
        set_model_state_dict(model, {key: value for key, value in flat.items() if isinstance(value, Tensor)})
        return
    weights, state = get_state_dict(model, optimizer)
    dcp_load({"model": weights, "optimizer": state}, checkpoint_id=folder / name)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def main(rank: int, folder: Path, what: str, *names: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{what}.store", rank=rank, world_size=WORLD)
    losses: dict[str, list[float]] = {}
    if what == "train":
        model, optimizer, scheduler = build()
        losses[what] = [*trained(rank, model, optimizer, scheduler, range(2))]
        save(rank, folder, model, optimizer, 2)
        losses[what] += trained(rank, model, optimizer, scheduler, range(2, STEPS))
    for name in names:
        model, optimizer, scheduler = build()
        for _ in range(4):
            scheduler.step()
        load(folder, name, model, optimizer)
        losses[name] = [*trained(rank, model, optimizer, scheduler, range(4, STEPS))]
    if rank == 0:
        (folder / f"{what}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
