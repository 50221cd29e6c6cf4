"""A divided program is planned in seconds, and its size does not depend on the degree of data parallelism."""

import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from piper import losses, strategies
from piper.capture.trace.annotate import annotate_layers
from piper.compiler import Program, compile
from piper.job import Job
from piper.models.huggingface import tensor_plan


class Block(nn.Module):
    """A feed-forward with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


def small(dp: int) -> Program:
    weights = {"*.up": 0, "*.down": 1}
    job = Job(
        model=lambda: annotate_layers(nn.Sequential(Block(), Block())),
        loss=loss,
        data=lambda: [{"x": torch.zeros(dp * 2, 8, 4)}],
        strategy=strategies.tensor(layers=2, tp=2, dp=dp, pp=2, zero=1, microbatches=2, weights=weights),
    )
    return compile(job, device="cpu")


def test_a_plan_does_not_grow_with_replicas() -> None:
    two, eight = small(2), small(8)
    sizes = [[len(plan.instrs) for plan in made.plans] for made in (two, eight)]
    assert sizes[0] == sizes[1]
    assert [sum(len(plan.devices) for plan in made.plans) for made in (two, eight)] == [8, 32]
    assert len(two.graph.nodes) == len(eight.graph.nodes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_llama_of_36_layers_is_planned_and_proven_in_half_a_minute() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    tokens = torch.zeros(128, 2048, dtype=torch.int64)

    def model() -> nn.Module:
        return annotate_layers(LlamaForCausalLM(config))

    strategy = strategies.tensor(
        layers=36, tp=8, dp=8, pp=4, zero=1, microbatches=16, weights=tensor_plan(config)
    )
    job = Job(
        model=model,
        loss=losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=strategy,
        precision="bf16",
    )
    begin = time.process_time()  # of this process: the machine may have other work
    made = compile(job, device="cpu")
    assert time.process_time() - begin < 30
    assert sum(len(plan.devices) for plan in made.plans) == 256
    assert len(made.plans.plans) == 4
