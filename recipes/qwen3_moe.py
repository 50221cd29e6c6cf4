"""An unmodified Qwen3-MoE of transformers: its experts, named by module path, divided over two devices."""

from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import piper
from piper.data import TextFile
from piper.models import huggingface

TEXT = Path(__file__).with_name("data") / "text.txt"
WIDTHS = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "experts_implementation": huggingface.NAME}


def model() -> nn.Module:
    """The model as transformers builds it; `experts_implementation` lets its experts be divided."""
    huggingface.register_experts()
    built = Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDTHS, **HEADS, **EXPERTS))
    return piper.annotate_modules(built, {"EP": ["model.layers.*.mlp.experts"]})


def ep() -> piper.Job:
    return piper.Job(
        model=model,
        loss=huggingface.token_loss,
        data=lambda: TextFile(TEXT, length=64, batch=16),
        strategy=[piper.replicate(piper.at(), [0, 1], zero=2), piper.shard(piper.at(EP="*"), [0, 1])],
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        clip_norm=1.0,
        steps=200,
    )
