"""Hybrid linear attention (MiniMax-01): of four layers three have lightning attention and one softmax.

An unmodified model of transformers. Layers of both kinds share a pipeline like any others.
"""

from functools import partial

import torch
from text import text
from transformers import MiniMaxConfig, MiniMaxForCausalLM

import piper

SMALL = MiniMaxConfig(
    vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip


def model(config: MiniMaxConfig) -> torch.nn.Module:
    return piper.annotate_layers(MiniMaxForCausalLM(config))


def small() -> piper.Job:
    """Two ranks of two devices with ZeRO-3."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=8, length=12, vocab=96),
        strategy=piper.strategies.pipeline(layers=4, pp=2, dp=2, zero=3, microbatches=2),
    )
