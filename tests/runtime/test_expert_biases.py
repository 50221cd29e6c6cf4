"""Experts with biases over several devices, against plain PyTorch."""

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.models import huggingface
from tests import plain

DEVICES = [0, 1, 2, 3]


def gpt_oss(implementation: str) -> nn.Module:
    """Build an unmodified GPT-OSS, with experts that have biases. Each layer is a stage."""
    from transformers import GptOssConfig, GptOssForCausalLM

    huggingface.register_experts()
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"], experts_implementation=implementation,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    regions: dict[str, Sequence[str | Sequence[str]]] = {
        "PP": [["model.layers.0"], ["model.layers.1"]],
        "EP": ["model.layers.*.mlp.experts"],
    }
    return piper.annotate_modules(model, regions)


def batches() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [
        {name: torch.randint(0, 64, (8, 12), generator=rng) for name in ("tokens", "labels")}
        for _ in range(2)
    ]


def experts(ways: int, zero: int) -> list[piper.Directive]:
    return [
        piper.replicate(piper.at(), DEVICES, zero=zero),
        piper.shard(piper.at(EP="*"), DEVICES, ways=ways),
    ]


def staged() -> list[piper.Directive]:
    pairs = [[0, 1], [2, 3]]
    placed = [piper.replicate(piper.at(PP=stage), pair, zero=1) for stage, pair in enumerate(pairs)]
    sharded = [piper.shard(piper.at(PP=stage, EP="*"), pair) for stage, pair in enumerate(pairs)]
    split = piper.split(piper.at(), axis="MB", parts=2)
    return [*placed, *sharded, split, *piper.schedules.one_f_one_b(2, 2)]


STRATEGIES: Mapping[str, list[piper.Directive]] = {
    "ep2 zero-3": experts(2, 3),
    "ep4": experts(4, 0),
    "ep2 in a pipeline": staged(),
}


@pytest.mark.parametrize(
    "strategy",
    [name if name == "ep2 zero-3" else pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES],
)
def test_gpt_oss_trains_as_in_plain_pytorch(strategy: str) -> None:
    job = piper.Job(
        model=partial(gpt_oss, huggingface.NAME),
        loss=huggingface.token_loss,
        data=batches,
        strategy=STRATEGIES[strategy],
        optimizer=plain.sgd,
        precision="fp64",
    )
    with piper.launch(piper.compile(job, device="cpu")) as run:
        losses = [run.step(batch).loss for batch in batches()]
        state = run.state_dict()
    wanted = plain.train(partial(gpt_oss, "eager"), huggingface.token_loss, batches())
    assert losses == pytest.approx(wanted.losses, abs=1e-9)
    assert plain.largest_difference(wanted.state, state) < 1e-9
