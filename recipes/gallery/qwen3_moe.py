"""Qwen3-MoE: an unmodified model of transformers under pipeline and expert parallelism with ZeRO-1.

As NVIDIA measured 235B-A22B (Megatron-Bridge 26.04.01): TP 2, PP 8 interleaved, EP 32, fp8 on 256 H100.
"""

from functools import partial

import torch
from text import text
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import piper
from piper.models import huggingface

WEIGHTS = {"*.q_proj|*.k_proj|*.v_proj|*embed_tokens|*lm_head": 0, "*.o_proj": 1}
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


def published(microbatches: int = 512) -> piper.Job:
    """235B-A22B: 94 layers; the embedding and the head count as layers of 32 stages with three each."""
    config = Qwen3MoeConfig(
        hidden_size=4096, moe_intermediate_size=1536, num_hidden_layers=94, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, experts_implementation=huggingface.NAME,
    )  # fmt: skip
    tokens = torch.zeros(1, 4096, dtype=torch.long).expand(16 * microbatches, -1)
    strategy = piper.strategies.tensor(
        layers=94, tp=2, dp=16, pp=8, zero=1, schedule="interleaved-1f1b", stages_per_rank=4,
        microbatches=microbatches, weights=WEIGHTS,
    )  # fmt: skip
    experts = [piper.shard(one.at, one.devices) for one in strategy if one.verb == "replicate"]
    cut = next(n for n, one in enumerate(strategy) if one.verb == "split")
    strategy[cut:cut] = [*experts, piper.precision(piper.at(), "fp8")]
    return piper.Job(
        model=partial(model, config),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=strategy,
        precision="bf16",
    )
