"""GPT-OSS: sinks, sliding windows and experts with biases, in an unmodified model of transformers.

Its experts have biases, and are sharded as all else is, by ZeRO-3. A ZB-V.
"""

from functools import partial

import torch
from text import text
from transformers import GptOssConfig, GptOssForCausalLM

import piper

SMALL = GptOssConfig(
    vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip


def model(config: GptOssConfig) -> torch.nn.Module:
    return piper.annotate_layers(GptOssForCausalLM(config))


def small() -> piper.Job:
    """Two ranks of two devices, two stages on each rank."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=8, length=12, vocab=96),
        strategy=piper.strategies.pipeline(layers=4, pp=2, dp=2, zero=3, schedule="zbv", microbatches=4),
    )
