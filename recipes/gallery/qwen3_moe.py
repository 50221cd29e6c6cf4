"""Qwen3-MoE: an unmodified model of transformers under pipeline and expert parallelism with ZeRO-1.

The Qwen3 report (2505.09388) has the sizes of 235B-A22B, and says nothing of its parallelism: this is ours.
"""

from functools import partial

import torch
from text import text
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import piper
from piper.models import huggingface

SMALL = Qwen3MoeConfig(
    vocab_size=96, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    experts_implementation=huggingface.NAME,
)  # fmt: skip


def model(config: Qwen3MoeConfig) -> torch.nn.Module:
    huggingface.register_experts()
    return piper.annotate_layers(Qwen3MoeForCausalLM(config))


def small() -> piper.Job:
    """Two ranks in a V of four stages: forwards of one direction run against backwards of the other."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=8, length=12, vocab=96),
        strategy=piper.strategies.moe(
            layers=4, pp=2, dp=2, ep=2, zero=1, schedule="dualpipe-v", microbatches=4
        ),
    )


def published() -> piper.Job:
    """235B-A22B on 1,024 devices: 8 ranks in a V, experts over 32 of the 128 devices of a rank."""
    config = Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, experts_implementation=huggingface.NAME,
    )  # fmt: skip
    tokens = torch.zeros(1, 4096, dtype=torch.long).expand(4096, 4096)
    return piper.Job(
        model=partial(model, config),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=piper.strategies.moe(
            layers=94, pp=8, dp=128, ep=32, zero=1, schedule="dualpipe-v", microbatches=32
        ),
        precision="bf16",
    )
