"""Megatron GPT: interleaved 1F1B over ranks of tensor-parallel groups, every layer recomputed.

As published (2104.04473): TP 8, PP 8, two stages a rank, DP 24 for 145.6B, 1,536 A100. Here it is GPT-NeoX.
"""

from functools import partial

import torch
from text import text
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import piper

WEIGHTS = {
    "*.query_key_value|*.dense_h_to_4h|*embed_in|*lm_head": 0,
    "*.attention.dense|*.dense_4h_to_h": 1,
}
SMALL = GPTNeoXConfig(
    vocab_size=96, hidden_size=32, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4
)


def model(config: GPTNeoXConfig) -> torch.nn.Module:
    return piper.annotate_layers(GPTNeoXForCausalLM(config))


def strategy(config: GPTNeoXConfig, **degrees: int) -> list[piper.Directive]:
    """Tensor parallelism without sequence parallelism, as Megatron-LM had it in 2021."""
    stages = piper.strategies.tensor(
        layers=config.num_hidden_layers, schedule="interleaved-1f1b", stages_per_rank=2, sequence=False,
        weights=WEIGHTS, **degrees,
    )  # fmt: skip
    return [*stages, piper.remat(piper.at(LAYER="*"), 0, across="LAYER")]


def small() -> piper.Job:
    """Two ranks of two stages, each on a group of two devices."""
    return piper.Job(
        model=partial(model, SMALL),
        loss=piper.losses.huggingface,
        data=lambda: text(samples=8, length=12, vocab=96),
        strategy=strategy(SMALL, tp=2, pp=2, microbatches=4),
    )


def published() -> piper.Job:
    """145.6B parameters, 2,304 samples of 2,048 tokens."""
    config = GPTNeoXConfig(
        vocab_size=51_200, hidden_size=12_288, intermediate_size=49_152, num_hidden_layers=80,
        num_attention_heads=96,
    )  # fmt: skip
    tokens = torch.zeros(1, 2048, dtype=torch.long).expand(2304, 2048)
    return piper.Job(
        model=partial(model, config),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=strategy(config, tp=8, pp=8, dp=24, microbatches=48),
        precision="bf16",
    )
