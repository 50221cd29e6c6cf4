"""DeepSeek-V3, as transformers has it: DualPipe, experts across nodes, ZeRO-1, no tensor parallelism.

As published (2412.19437): 16 ranks of 128 H800, experts over 64 of them, 15,360 x 4,096 tokens in a step.
"""

from functools import partial

import torch
from text import text
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import piper
from piper.models import huggingface

SMALL = DeepseekV3Config(
    vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
    qk_nope_head_dim=4, v_head_dim=8, head_dim=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, first_k_dense_replace=1, experts_implementation=huggingface.NAME,
)  # fmt: skip


def model(config: DeepseekV3Config) -> torch.nn.Module:
    huggingface.register_experts()
    return piper.annotate_layers(DeepseekV3ForCausalLM(config))


def small() -> piper.Job:
    """Two ranks of two devices, which divide the experts: microbatches enter at both ends."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=16, length=12, vocab=96),
        strategy=piper.strategies.moe(
            layers=4, pp=2, dp=2, ep=2, zero=1, schedule="dualpipe", microbatches=8, dense=1
        ),
    )


def published(microbatches: int = 120, attention: str = "sdpa") -> piper.Job:
    """The published size: 61 layers, 3 of them dense, 256 experts, products in fp8."""
    config = DeepseekV3Config(experts_implementation=huggingface.NAME, attn_implementation=attention)
    tokens = torch.zeros(1, 4096, dtype=torch.long).expand(128 * microbatches, -1)
    strategy = piper.strategies.moe(
        layers=61, pp=16, dp=128, ep=64, zero=1, schedule="dualpipe", microbatches=microbatches, dense=3
    )
    return piper.Job(
        model=partial(model, config),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=[piper.precision(piper.at(), "fp8"), *strategy],
        precision="bf16",
    )
