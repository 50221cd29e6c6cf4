"""GPT-OSS: sinks, sliding windows and experts with biases, in an unmodified model of transformers.

`small` is a ZB-V with ZeRO-3. As NVIDIA measured 120B (Megatron-Bridge 26.04.01): PP 4, DP 16, EP 8, 64 H100.
"""

from functools import partial

import torch
from text import text
from transformers import GptOssConfig, GptOssForCausalLM

import piper
from piper.models import huggingface

SMALL = GptOssConfig(
    vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
    layer_types=["sliding_attention", "full_attention"] * 2, experts_implementation=huggingface.NAME,
)  # fmt: skip


def model(config: GptOssConfig) -> torch.nn.Module:
    huggingface.register_experts()
    return piper.annotate_layers(GptOssForCausalLM(config))


def small() -> piper.Job:
    """Two ranks of two devices, which divide the experts; two stages on each rank."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=8, length=12, vocab=96),
        strategy=piper.strategies.moe(layers=4, pp=2, dp=2, ep=2, zero=3, schedule="zbv", microbatches=4),
    )


def published(microbatches: int = 80) -> piper.Job:
    """120B-A5B: 36 layers, 128 experts, one sequence of 4,096 tokens in each microbatch of a device."""
    config = GptOssConfig(experts_implementation=huggingface.NAME)
    tokens = torch.zeros(1, 4096, dtype=torch.long).expand(16 * microbatches, -1)
    return piper.Job(
        model=partial(model, config),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=piper.strategies.moe(
            layers=36, pp=4, dp=16, ep=8, zero=1, schedule="1f1b", microbatches=microbatches
        ),
        precision="bf16",
    )
