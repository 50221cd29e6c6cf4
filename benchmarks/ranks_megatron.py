"""Megatron-Core itself as a side of `gpu_systems`: its GPT model, schedules, data parallelism and optimizer.

It needs `megatron-core` on the path, and runs without Transformer Engine and Apex, which are not there. Its
local layers have two modules in their place, given by its own specification: attention by torch's
`scaled_dot_product_attention`, since its own keeps the whole matrix of scores, and torch's RMSNorm marked for
sequence parallelism, which its own refuses. Its fusions are those that it compiles by `torch.compile`, and
torch's AdamW is the fused one. `zero1` is its distributed optimizer: optimizer state sharded, parameters and
gradients whole. `blocks` compiles its layers, which it does not do itself. Context parallelism needs
Transformer Engine, so there is no such row.

The decoder of the other sides is its GPT model: the weights of the seed are given to it, also to its float32
copies. Gradients are added and reduced in float32.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.ranks_probe import Probe
from benchmarks.ranks_rows import RANKS, ROWS, SEED, SIZES, Row, Shape, Size, batch_of, model_of
from benchmarks.ranks_sides import Figures, Task
from piper.models import decoder

ROWS_OF_MEGATRON = ("ddp", "tp4", "1f1b", "interleaved", "pp2_tp2")
ROWS_OF_BLOCKS = ("ddp", "1f1b", "interleaved")
ROWS_OF_ZERO1 = ("fsdp", "pp2_fsdp2")
LOGGED = 10  # steps whose losses are reported
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTask:
    """A row for Megatron-Core, and which of its ways is run."""

    row: Row
    size: Size
    device: str
    zero1: bool
    blocks: bool

    @property
    def shape(self) -> Shape:
        """Return the model and batch."""
        return self.size.shapes[self.row.name]

    @property
    def config(self) -> decoder.Config:
        """Return the sizes of the model."""
        config = self.shape.model
        assert isinstance(config, decoder.Config)
        return config

    @property
    def bf16(self) -> bool:
        """Return whether it computes in bf16."""
        return self.size.precision == "bf16"


def train_megatron(task: Task, rank: int, *, zero1: bool = False, blocks: bool = False) -> Figures:
    """Train a row as a rank of Megatron-Core."""
    begin = time.perf_counter()
    row = ROWS[task.row]
    chosen = MegatronTask(
        row=row, size=SIZES[task.size], device=task.device, zero1=zero1, blocks=blocks and task.compiled
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port)}
    if row.tp > 1:  # it asks for this: collectives and computation then start in the order of their calls
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    backend = "gloo"
    if task.device == "cuda":
        torch.cuda.set_device(0)
        backend = "nccl"
    with ExitStack() as stack:
        if task.device == "cpu":
            stack.enter_context(on_host())
        if not task.compiled:
            torch.compiler.set_stance("force_eager")
        dist.init_process_group(backend, rank=rank, world_size=RANKS)
        stack.callback(dist.destroy_process_group)
        return measure_megatron(chosen, task.steps, begin)


def measure_megatron(task: MegatronTask, steps: int, begin: float) -> Figures:
    """Build the model and time its steps, which begin and end together on all ranks."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    row, shape = task.row, task.shape
    interleaved = row.stages // row.pp if row.stages > row.pp else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=interleaved,
        create_gloo_process_groups=False,
    )
    if task.device == "cuda":
        model_parallel_cuda_manual_seed(SEED)
    chunks, optimizer = trained(task)
    forward_backward = get_forward_backward_func()
    batch = samples_of(task, parallel_state.get_data_parallel_rank())
    probe, losses, norm = Probe(task.device), [], 0.0
    build_s = time.perf_counter() - begin

    def train(step: int) -> None:
        nonlocal norm
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[microbatches(batch, shape) for _ in chunks],
            model=chunks,
            num_microbatches=shape.microbatches,
            seq_length=shape.length,
            micro_batch_size=shape.samples,
            forward_only=False,
        )
        updated, square, _ = optimizer.step()
        assert updated
        norm = norm or square
        if found and step < LOGGED:
            losses.append(torch.stack([one["loss"] for one in found]).mean().item())

    times = probe.timed(steps, train)
    memory, by_rank = probe.memory_of_ranks(), [losses] * RANKS
    dist.all_gather_object(by_rank, losses)
    last = by_rank[-(RANKS // row.pp) :]  # of the last stage, which has the losses
    losses = [sum(parts) / len(parts) for parts in zip(*last, strict=True)]
    return Figures(times=times, losses=losses, norm=norm, memory=memory, build_s=build_s)


def samples_of(task: MegatronTask, replica: int) -> dict[str, Tensor]:
    """Return the batch of a replica."""
    batch = batch_of(task.row, task.shape)
    return {name: value.chunk(task.row.dp)[replica].to(task.device) for name, value in batch.items()}


def microbatches(batch: Mapping[str, Tensor], shape: Shape) -> Iterator[Mapping[str, Tensor]]:
    """Yield the microbatches of a replica's batch."""
    for index in range(shape.microbatches):
        rows = slice(index * shape.samples, (index + 1) * shape.samples)
        yield {name: value[rows] for name, value in batch.items()}


def forward_step(
    batches: Iterator[Mapping[str, Tensor]],
    model: Any,  # noqa: ANN401  Megatron-Core is not installed where types are checked
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Run a stage on the next microbatch: Megatron's schedules call it."""
    batch = next(batches)
    positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
    output = model(batch["tokens"], positions[None], None, labels=batch["labels"])

    def loss(by_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = by_token.mean()
        return mean, {"loss": mean.detach().clone()}  # the schedule divides the mean in place

    return output, loss


# the model


def trained(task: MegatronTask) -> tuple[list[Any], Any]:
    """Return this rank's parts of the model, in Megatron's data parallelism, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    row = task.row
    config = transformer_config(task)
    virtual = [None] if row.stages == row.pp else [*range(row.stages // row.pp)]
    chunks = [gpt(task, config, index) for index in virtual]
    weights = [load(chunk, task, parallel_state.get_tensor_model_parallel_rank()) for chunk in chunks]
    if task.blocks:
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                layer.compile(dynamic=False)
    replicated = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=row.dp > 1,
                use_distributed_optimizer=task.zero1,
                overlap_param_gather=task.zero1,
            ),
            Float16Module(config, chunk) if task.bf16 else chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if row.dp > 1:
        no_sync = [chunk.no_sync for chunk in replicated]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-4,
            weight_decay=0.01,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            clip_grad=1e9,  # it computes the norm
            bf16=task.bf16,
            params_dtype=task.size.dtype,
            use_distributed_optimizer=task.zero1,
            overlap_param_gather=task.zero1,
        ),
        replicated,
        config_overrides={},  # weights of norms decay as well
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        group["fused"] = True
    if task.bf16:
        widen(optimizer, chunks, weights, zero1=task.zero1)
    return replicated, optimizer


def widen(
    optimizer: Any,  # noqa: ANN401
    chunks: Sequence[Any],
    weights: Sequence[Mapping[str, Tensor]],
    *,
    zero1: bool,
) -> None:
    """Give the optimizer's float32 copies the weights before they were rounded to bf16."""
    if zero1:
        optimizer.reload_model_params({f"model{index}": dict(each) for index, each in enumerate(weights)})
        return
    for chunk, state in zip(chunks, weights, strict=True):
        for name, param in chunk.named_parameters():
            param.main_param.copy_(state[name])


def transformer_config(task: MegatronTask) -> Any:  # noqa: ANN401
    """Return Megatron's configuration of a row."""
    from megatron.core.transformer import TransformerConfig

    row, sizes = task.row, task.config
    interleaved = row.stages > row.pp
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.dim,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.hidden,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=task.bf16,
        params_dtype=task.size.dtype,
        pipeline_dtype=task.size.dtype,
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.stages // row.pp if interleaved else None,
        sequence_parallel=row.tp > 1,
        gradient_accumulation_fusion=False,  # a kernel of Apex
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=task.bf16,  # its gradient is always bf16
        deallocate_pipeline_outputs=not interleaved,  # it would free what is still being sent
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def gpt(task: MegatronTask, config: Any, virtual: int | None) -> Any:  # noqa: ANN401
    """Return one of this rank's stages, its weights not set yet."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceNorm
    layer.submodules.self_attention.submodules.core_attention = Attention
    count = get_num_layers_to_build(config, vp_stage=virtual)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=virtual)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=virtual)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * count, layer_norm=SequenceNorm
        ),
        vocab_size=task.config.vocab,
        max_sequence_length=task.shape.length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=task.config.rope_base,
        vp_stage=virtual,
    )
    return model.to(task.device)


class SequenceNorm:
    """Builds an RMSNorm whose gradient Megatron sums over the ranks of sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> nn.RMSNorm:  # type: ignore[misc]  # noqa: ANN401
        norm = nn.RMSNorm(hidden_size, eps=eps, device=torch.cuda.current_device())
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class Attention(nn.Module):
    """Causal attention of Megatron's layers, which give [length, samples, heads, features]."""

    def __init__(self, config: Any, **_: object) -> None:  # noqa: ANN401
        super().__init__()
        self.shared = config.num_query_groups < config.num_attention_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return y.permute(2, 0, 1, 3).flatten(2)


# weights


def load(model: Any, task: MegatronTask, tensor_rank: int) -> dict[str, Tensor]:  # noqa: ANN401
    """Give a stage the weights of the seed, and return them in float32.

    Ranks build the whole model one after another: together they would need four times its memory.
    """
    weights: dict[str, Tensor] = {}
    for turn in range(RANKS):
        if turn == dist.get_rank():
            torch.manual_seed(SEED)
            with torch.device(task.device):
                state = as_megatron(model_of(task.config).state_dict(), task.config, task.row.tp, tensor_rank)
            numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
            with torch.no_grad():
                for name, param in model.named_parameters():
                    weights[name] = state[globally(name, numbers)].clone()
                    param.copy_(weights[name])
            del state
            if task.device == "cuda":
                torch.cuda.empty_cache()
        dist.barrier()
    return weights


def globally(name: str, numbers: Sequence[int]) -> str:
    """Return the name that a parameter of a stage has in the whole model."""
    before, layers, rest = name.partition("decoder.layers.")
    if not layers:
        return name
    index, _, inner = rest.partition(".")
    return f"{before}{layers}{numbers[int(index)]}.{inner}"


def as_megatron(
    state: Mapping[str, Tensor], config: decoder.Config, ways: int, rank: int
) -> dict[str, Tensor]:
    """Return the part of a decoder's weights that a rank of tensor parallelism has, under Megatron's names.

    The rows of `linear_qkv` are, for each key and value head, those of its query heads, its key, its value.
    Those of `linear_fc1` are the rank's rows of the gate and then of the other projection.
    """

    def rows(weight: Tensor) -> Tensor:
        return weight.chunk(ways)[rank]

    def columns(weight: Tensor) -> Tensor:
        return weight.chunk(ways, 1)[rank]

    named = {
        "embedding.word_embeddings.weight": rows(state["embedding.weight"]),
        "decoder.final_layernorm.weight": state["norm.weight"],
        "output_layer.weight": rows(state["head.weight"]),
    }
    for index in range(config.layers):
        ours, theirs = f"layers.{index}.", f"decoder.layers.{index}."
        heads = [
            state[f"{ours}attention.{name}.weight"].view(config.kv_heads, -1, config.dim) for name in "qkv"
        ]
        gate, up = (rows(state[f"{ours}ffn.{name}.weight"]) for name in ("gate", "up"))
        named |= {
            f"{theirs}input_layernorm.weight": state[f"{ours}attention_norm.weight"],
            f"{theirs}self_attention.linear_qkv.weight": rows(torch.cat(heads, 1)).flatten(0, 1),
            f"{theirs}self_attention.linear_proj.weight": columns(state[f"{ours}attention.out.weight"]),
            f"{theirs}pre_mlp_layernorm.weight": state[f"{ours}ffn_norm.weight"],
            f"{theirs}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{theirs}mlp.linear_fc2.weight": columns(state[f"{ours}ffn.down.weight"]),
        }
    return named


# without a GPU


class OnHost(TorchFunctionMode):
    """Takes the host for a CUDA device: Megatron names that itself."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = HOST
        if func is Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **named)


class NoGenerators:
    """Stands for Megatron's generators of CUDA, which nothing here draws from."""

    def fork(self, *_: object, **__: object) -> nullcontext[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True


@contextmanager
def on_host() -> Iterator[None]:
    """Let Megatron-Core run in this process without a GPU."""
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    tracker = NoGenerators()
    modules: list[ModuleType] = [*sys.modules.values()]
    for module in modules:
        if module.__name__.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            vars(module)["get_cuda_rng_tracker"] = lambda *_, **__: tracker
    torch.cuda.current_device = lambda: HOST  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    with OnHost():
        yield
