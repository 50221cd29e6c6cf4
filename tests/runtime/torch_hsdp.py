"""Trains a model of the zoo with torch's own FSDP2 on a mesh of two replicas of two shards: under torchrun.

It imports nothing of Piper that trains. usage: torch_hsdp.py FILE, which gets the full state after three steps.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import plain, zoo

STEPS, ROWS = 3, 8


def main(path: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    case, rank = zoo.case("mlp"), dist.get_rank()
    model = zoo.build(case, dtype=torch.float64)
    fully_shard(model, mesh=mesh)
    optimizer = plain.sgd(model.parameters())
    each = ROWS // 4
    for seed in range(STEPS):
        batch = case.batch(ROWS, seed)
        loss = case.loss(
            model, {name: field[rank * each : (rank + 1) * each] for name, field in batch.items()}
        )
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(state, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
