"""Experts, tensor and context parallelism in the search. A model of transformers is traced for these."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

import piper
from piper.check.check import check
from piper.compiler import compile
from piper.run.launch import launch_inline
from piper.tuning.choice import Recompute
from piper.tuning.space import Space
from piper.tuning.tune import tune
from tests import zoo

PLAIN = {"recompute": (Recompute(),), "schedules": ("1f1b",), "zeros": (0,), "mixed": False}


def agrees(job: piper.Job, strategy: list[piper.Directive]) -> bool:
    """Whether a strategy gives the numbers of one device, in fp64."""
    exact = replace(job, strategy=strategy, precision="fp64")
    program = compile(exact)
    return check(program, launch_inline, list(islice(exact.data(), 1)), 1e-9).ok


@pytest.mark.slow
def test_experts_are_divided() -> None:
    found = zoo.case("moe")
    job = piper.Job(model=found.model, loss=found.loss, data=lambda: [found.batch(8, 0)])
    space = Space(ranks=(1,), rows=(4,), experts=(2,), **PLAIN)  # type: ignore[arg-type]
    best = tune(job, "h100", 2, space=space, front=False).best
    assert best.choice.experts == 2
    assert {directive.verb for directive in best.strategy} == {"replicate", "shard"}
    assert best.bound <= best.step


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2), (2, 2)])
def test_tensor_and_context_parallelism(tensor: int, context: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    job = piper.Job(
        model=lambda: piper.annotate_layers(LlamaForCausalLM(config)),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(
            model(input_ids=batch["tokens"], use_cache=False).logits.flatten(0, 1), batch["labels"].flatten()
        ),
        data=lambda: [{"tokens": tokens, "labels": tokens}],
    )
    space = Space(ranks=(1, 2), tensor=(tensor,), context=(context,), **PLAIN)  # type: ignore[arg-type]
    found = tune(job, "h100", 4, space=space, front=False, trials=3)
    divided = [one for one in found.evaluated if (one.choice.tensor, one.choice.context) == (tensor, context)]
    assert divided
    assert agrees(job, list(divided[0].strategy))
