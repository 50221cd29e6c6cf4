"""DeepSpeed itself as a side of `gpu_systems`: its engine and ZeRO around the decoder of the other sides.

It needs `deepspeed` and what that imports on the path, and builds none of its kernels. The optimizer is
torch's fused AdamW, as of the other sides. Weights begin as those of the seed, also its float32 copies, and
gradients are reduced in float32. There is no side without ZeRO: in bf16 its losses were others. The blocks
and the loss are compiled; under ZeRO-3 a block's weights are gathered at once, as a leaf of DeepSpeed's,
since its hooks inside would divide what is compiled.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks_probe import Probe
from benchmarks.ranks_rows import RANKS, ROWS, SEED, SIZES, adamw, batch_of, model_of
from benchmarks.ranks_sides import Figures, Task
from piper.models.causal import CausalDecoder
from piper.models.layers import Block

ROWS_OF_STAGE = {1: ("ddp",), 2: ("fsdp",), 3: ("fsdp",)}  # by ZeRO's stage
BUCKET = 50_000_000  # values
LOGGED = 10  # steps whose losses are reported


def train_deepspeed(task: Task, rank: int, *, stage: int) -> Figures:
    """Train a row as a rank of DeepSpeed."""
    begin = time.perf_counter()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        "DS_ACCELERATOR": task.device,
    }
    if task.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if task.device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    try:
        return measure_deepspeed(task, stage, begin)
    finally:
        dist.destroy_process_group()


def measure_deepspeed(task: Task, stage: int, begin: float) -> Figures:
    """Build DeepSpeed's engine and time its steps, which begin and end together on all ranks."""
    row, shape = ROWS[task.row], SIZES[task.size].shapes[task.row]
    engine = engine_of(task, stage)
    batch = {
        name: value.chunk(row.dp)[dist.get_rank()].to(task.device)
        for name, value in batch_of(row, shape).items()
    }
    loss_of = torch.compile(cross_entropy, dynamic=False) if task.compiled else cross_entropy
    probe, losses, norm = Probe(task.device), [], 0.0
    build_s = time.perf_counter() - begin

    def train(step: int) -> None:
        nonlocal norm
        logits = engine(batch["tokens"])
        loss = loss_of(logits, batch["labels"])
        del logits  # its memory is the backward's
        engine.backward(loss)
        engine.step()
        norm = norm or float(engine.get_global_grad_norm())
        if step < LOGGED:
            losses.append(loss.item())

    times = probe.timed(task.steps, train)
    memory, by_rank = probe.memory_of_ranks(), [losses] * RANKS
    dist.all_gather_object(by_rank, losses)
    losses = [sum(parts) / RANKS for parts in zip(*by_rank, strict=True)]
    return Figures(times=times, losses=losses, norm=norm, memory=memory, build_s=build_s)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of a replica's samples."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def engine_of(task: Task, stage: int) -> Any:  # noqa: ANN401  DeepSpeed is not installed where types are checked
    """Return DeepSpeed's engine around the decoder, with the weights of the seed."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    size = SIZES[task.size]
    model = model_of_seed(task)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if stage == 3:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    if task.compiled:
        compile_blocks(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=config_of(stage, size.shapes[task.row].samples, bf16=size.precision == "bf16"),
        dist_init_required=False,
    )
    if size.precision == "bf16":
        for name, param in engine.module.named_parameters():
            safe_set_full_fp32_param(param, state[name])
    del state
    if task.device == "cuda":
        torch.cuda.empty_cache()
    return engine


def model_of_seed(task: Task) -> CausalDecoder:
    """Return the decoder with the weights of the seed, built by one rank after another."""
    model = None
    for turn in range(RANKS):
        if turn == dist.get_rank():
            torch.manual_seed(SEED)
            with torch.device(task.device):
                model = model_of(SIZES[task.size].shapes[task.row].model)
        dist.barrier()
    assert model is not None
    return model


def compile_blocks(model: nn.Module) -> None:
    """Compile what the blocks compute, and leave DeepSpeed's hooks around them as they are."""
    # Each parameter has a number for which torch compiles: beyond this limit blocks would run eagerly.
    torch._dynamo.config.recompile_limit = 256
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]


def config_of(stage: int, samples: int, *, bf16: bool) -> Mapping[str, object]:
    """Return DeepSpeed's configuration."""
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET,  # its default takes GiB
        "allgather_bucket_size": BUCKET,
    }
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
    }
