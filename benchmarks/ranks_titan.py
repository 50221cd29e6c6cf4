"""TorchTitan itself as a side of `gpu_systems`: its own trainer, model, schedules and compilation.

It needs `torchtitan`, `torchdata` and `tyro` on the path. What its trainer imports beyond that and does not
use here is replaced by empty modules. Its Llama, Qwen3 and DeepSeek-V3 are the models of the other sides: the
weights of the seed are given to them, with the features of heads in the order of their rotary embeddings.
"""

import dataclasses
import importlib.util
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.ranks_probe import Probe
from benchmarks.ranks_rows import RANKS, ROWS, SEED, SIZES, Row, Shape, batch_of, model_of
from benchmarks.ranks_sides import Figures, Task
from benchmarks.ranks_titan_experts import (
    as_titan_experts,
    deepseek_v3,
    let_experts_run_on_the_host,
    qwen3,
)
from piper.models import decoder, moe
from piper.models.causal import Sizes
from tests import deepseek

ROWS_OF_TITAN = (  # its Qwen3 has no pipeline
    "fsdp",
    "pp2_fsdp2",
    "pp2_fsdp2_reshard",
    "qwen3_ep4",
    "deepseek_ep4",
    "deepseek_pp2_ep2",
)
LOGGED = 10  # steps whose losses it reports
BATCH = "input"


def empty_modules() -> None:
    """Let TorchTitan import what it does not use here, where that is not installed."""
    names: dict[str, tuple[str, dict[str, object]]] = {  # and what has them, where it is installed
        "datasets": ("datasets", {"Dataset": object, "load_dataset": None}),
        "datasets.distributed": ("datasets", {"split_dataset_by_node": None}),
        "tokenizers": ("tokenizers", {"AddedToken": object, "Tokenizer": object}),
        "torch.utils.tensorboard": ("tensorboard", {"SummaryWriter": object}),
    }
    absent = [name for name, (package, _) in names.items() if importlib.util.find_spec(package) is None]
    for name in absent:
        sys.modules[name] = module = types.ModuleType(name)
        vars(module).update(names[name][1])


def prepare_for(device: str) -> None:
    """Let TorchTitan be imported here, and run without a GPU if this is the host."""
    if device == "cpu":  # it would look for a GPU
        torch._utils._get_available_device_type = lambda: "cpu"
    empty_modules()
    if device == "cpu":
        let_experts_run_on_the_host()


def environment_of(task: Task, rank: int) -> dict[str, str]:
    """Return what torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
    }


def train_titan(task: Task, rank: int) -> Figures:
    """Train a row as a rank of TorchTitan."""
    begin = time.perf_counter()
    os.environ.update(environment_of(task, rank))
    prepare_for(task.device)
    try:
        return measure_titan(task, begin)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def measure_titan(task: Task, begin: float) -> Figures:
    """Build TorchTitan's trainer and time its steps, which begin and end together on all ranks."""
    trainer = trainer_of(task)
    load_weights(trainer, task)
    logged: list[tuple[float, float]] = []
    trainer.metrics_processor.should_log = lambda step: step <= LOGGED
    trainer.metrics_processor.log = lambda step, mean, worst, norm, **_: logged.append((mean, norm))
    batches = trainer.batch_generator(trainer.dataloader)
    probe = Probe(task.device)
    build_s = time.perf_counter() - begin

    def train(step: int) -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)

    times = probe.timed(task.steps, train)
    memory, by_rank = probe.memory_of_ranks(), [logged] * RANKS
    dist.all_gather_object(by_rank, logged)
    last = by_rank[-1]  # of the last stage, which has the loss
    losses, norm = [mean for mean, _ in last], last[0][1] / summed(task)
    return Figures(times=times, losses=losses, norm=norm, memory=memory, build_s=build_s)


def summed(task: Task) -> int:
    """Return of how many tokens its gradients are sums: with a pipeline 0.2.2 divides only the loss it logs.

    Adam's steps are the same.
    """
    row, shape = ROWS[task.row], SIZES[task.size].shapes[task.row]
    return shape.rows(row.dp) * shape.length if row.pp > 1 else 1


def trainer_of(task: Task) -> Any:  # noqa: ANN401  TorchTitan is not installed where types are checked
    """Return TorchTitan's trainer of a row."""
    row, size = ROWS[task.row], SIZES[task.size]
    shape = size.shapes[task.row]
    on_gpu = task.device == "cuda"
    family, args = family_of(shape.model, on_gpu=on_gpu)

    def samples(replica: int) -> tuple[Tensor, Tensor]:
        batch = batch_of(row, shape)
        return batch["tokens"].chunk(row.dp)[replica], batch["labels"].chunk(row.dp)[replica]

    trainer = built_trainer(family, args, samples, words_of(task, row, shape), on_gpu=on_gpu)
    for part in trainer.model_parts:
        if part.norm is not None:  # that of DeepSeek-V3 has no eps, so its type would decide
            part.norm.eps = shape.model.eps
        for module in part.modules() if not on_gpu else ():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # the host has no other
    return trainer


def family_of(config: Sizes, *, on_gpu: bool) -> tuple[Any, Any]:
    """Return TorchTitan's module of a model, and its arguments."""
    if isinstance(config, moe.Config):
        return qwen3(config, on_gpu=on_gpu)
    if isinstance(config, deepseek.Config):
        return deepseek_v3(config, on_gpu=on_gpu)
    assert isinstance(config, decoder.Config) and config.head_dim * config.heads == config.dim
    return llama(config)


def llama(config: decoder.Config) -> tuple[Any, Any]:
    """Return TorchTitan's Llama and its arguments."""
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    args = llama3.TransformerModelArgs(
        dim=config.dim,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        vocab_size=config.vocab,
        multiple_of=config.hidden,  # it rounds up to a multiple
        ffn_dim_multiplier=config.hidden / (8 / 3 * config.dim) * 0.9,
        norm_eps=config.eps,
        rope_theta=config.rope_base,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
    return llama3, args


def built_trainer(
    family: Any,  # noqa: ANN401  a module of TorchTitan
    args: object,
    samples: Callable[[int], tuple[Tensor, Tensor]],
    words: Sequence[str],
    *,
    on_gpu: bool,
) -> Any:  # noqa: ANN401
    """Return TorchTitan's trainer of one of its models.

    samples: gives the tokens and labels of a replica, the same in all steps.
    """
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    class SameBatch(BaseDataLoader):  # type: ignore[misc]
        """Gives a replica the same samples in every step."""

        def __init__(self, replica: int) -> None:
            self.tokens, self.labels = samples(replica)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                yield {BATCH: self.tokens}, self.labels

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: Mapping[str, object]) -> None:
            pass

    spec = dataclasses.replace(
        family.get_train_spec(),
        model_args={"ours": args},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_rank, **_: SameBatch(dp_rank),
        build_metrics_processor_fn=None if on_gpu else no_metrics,
        state_dict_adapter=None,
    )
    train_spec.register_train_spec("ours", spec)
    return Trainer(ConfigManager().parse_args([*words]))


COMMON = {  # options of all its trainings here
    "model.name": "ours",
    "model.flavor": "ours",
    "training.max_norm": 1e9,
    "optimizer.lr": 1e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.warmup_steps": 0,
    "lr_scheduler.decay_ratio": 0.0,
    "activation_checkpoint.mode": "none",
}


def as_words(options: Mapping[str, object], *, compiled: bool) -> list[str]:
    """Return TorchTitan's command line of these options and the common ones."""
    named = {**COMMON, "job.dump_folder": tempfile.mkdtemp(prefix="titan"), **options}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*words, *(["--compile.enable"] if compiled else [])]


def words_of(task: Task, row: Row, shape: Shape) -> list[str]:
    """Return TorchTitan's command line of a row."""
    options = {
        "training.seq_len": shape.length,
        "training.local_batch_size": shape.samples * shape.microbatches,
        "training.steps": task.steps,
        "training.mixed_precision_param": "bfloat16" if SIZES[task.size].precision == "bf16" else "float32",
        "parallelism.data_parallel_shard_degree": row.dp,
        "parallelism.expert_parallel_degree": row.ep,
        "parallelism.pipeline_parallel_degree": row.pp,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.pipeline_parallel_microbatch_size": shape.samples,
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
        "parallelism.fsdp_reshard_after_forward": "always" if row.zero == 3 else "default",
        "metrics.log_freq": task.steps + 1,
    }
    return as_words(options, compiled=task.compiled)


def no_metrics(*_: object) -> types.SimpleNamespace:
    """Return what stands for TorchTitan's metrics where there is no GPU."""
    peak = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak)
    color = types.SimpleNamespace(blue="", red="", reset="", yellow="")
    return types.SimpleNamespace(
        color=color, device_memory_monitor=monitor, ntokens_since_last_log=0, data_loading_times=[]
    )


def load_weights(trainer: Any, task: Task) -> None:  # noqa: ANN401
    """Give the trainer's model the weights of the seed. Ranks build the whole model one after another."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    config = SIZES[task.size].shapes[task.row].model
    for turn in range(RANKS):
        if turn == dist.get_rank():
            torch.manual_seed(SEED)
            with torch.device(task.device):
                state = weights_of(config)
        dist.barrier()
    options = StateDictOptions(full_state_dict=True, strict=False)
    for part in trainer.model_parts:
        names = [name.replace("_orig_mod.", "") for name in part.state_dict()]  # of compiled layers too
        wanted: dict[str, Any] = {name: state[name] for name in names}  # in one order
        set_model_state_dict(part, wanted, options=options)
    del state
    if task.device == "cuda":
        torch.cuda.empty_cache()


def weights_of(config: Sizes) -> dict[str, Tensor]:
    """Return a model's first weights under TorchTitan's names."""
    state = model_of(config).state_dict()
    if isinstance(config, moe.Config | deepseek.Config):
        return as_titan_experts(state, config)
    return as_titan(state, config.head_dim)


NAMES = {
    "embedding": "tok_embeddings",
    "head": "output",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.out": "attention.wo",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}


def as_titan(state: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Return a decoder's weights under TorchTitan's names.

    Its rotary embedding turns features 2i and 2i + 1 of a head together, ours i and i + half.
    """
    named = {}
    for name, value in state.items():
        module = name.removesuffix(".weight")
        layer, _, inner = module.partition(".")[2].partition(".")
        if module.startswith("layers."):
            module = f"layers.{layer}.{NAMES.get(inner, inner)}"
            if inner in ("attention.q", "attention.k"):
                halves = value.view(-1, 2, head_dim // 2, value.shape[1])
                value = halves.transpose(1, 2).reshape(value.shape)
        else:
            module = NAMES.get(module, module)
        named[f"{module}.weight"] = value
    return named
