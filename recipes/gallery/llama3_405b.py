"""Llama 3 405B: 4D parallelism, with an embedding and a head that count as a layer each.

As published (2407.21783): TP 8, CP 16, PP 16 interleaved, DP 8 on 16,384 H100. 126 layers are two short of
128: the first and the last stage have one layer less.
"""

import torch
from text import text
from transformers import LlamaConfig, LlamaForCausalLM

import piper
from piper.directives import Directive, ShardAxis

FIELDS = {"input_ids": 1, "labels": 1}
SMALL = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def strategy(config: LlamaConfig, tp: int, cp: int, dp: int, **pipeline: object) -> list[Directive]:
    """Stages of equal cost over groups of `tp` devices; `cp` neighbouring groups divide each sequence."""
    stages = piper.strategies.tensor(
        layers=config.num_hidden_layers, tp=tp, dp=dp * cp, schedule="interleaved-1f1b",
        weights=piper.tensor_plan(config), embedding=1, head=1, **pipeline,
    )  # fmt: skip
    sequence = [
        piper.shard(one.at, one.devices, ways=cp, axis="CP", batch=FIELDS, balance="zigzag")
        for one in stages
        if isinstance(one, ShardAxis)
    ]
    cut = next(n for n, one in enumerate(stages) if one.verb == "split")
    return [*stages[:cut], *sequence, *stages[cut:]]


def small() -> piper.Job:
    """Two ranks of two stages each, 2 x 2 devices a rank: 1, 2, 2 and 1 layers."""
    return piper.Job(
        model=lambda: piper.annotate_layers(LlamaForCausalLM(SMALL)),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=4, length=16, vocab=96),
        strategy=strategy(SMALL, tp=2, cp=2, dp=1, pp=2, stages_per_rank=2, microbatches=4),
    )


def published() -> piper.Job:
    """The stage with 131,072 tokens: CP 16, DP 8."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126,
        num_attention_heads=128, num_key_value_heads=8, rope_theta=500_000.0,
    )  # fmt: skip
    tokens = torch.zeros(1, 131_072, dtype=torch.long).expand(128, -1)
    many = strategy(config, tp=8, cp=16, dp=8, pp=16, zero=1, stages_per_rank=8, microbatches=16)
    return piper.Job(
        model=lambda: piper.annotate_layers(LlamaForCausalLM(config)),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=many,
        precision="bf16",
    )
