"""Context parallelism with batches as `transformers` has them: labels that the loss moves, and a padding mask."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import piper
from tests import plain

FIELDS = {"input_ids": 1, "labels": 1, "attention_mask": 1}


def model() -> nn.Module:
    """Build a GPT-2: it computes all in the type of its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drops)
    return piper.annotate_layers(GPT2LMHeadModel(sizes))


def batch() -> dict[str, Tensor]:
    """Return rows of unequal length: padding is masked, and has no labels."""
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(0))
    used = torch.arange(16) < torch.tensor([[3], [7], [12], [16]])
    return {"input_ids": tokens, "labels": tokens.masked_fill(~used, -100), "attention_mask": used.long()}


@cache
def alone() -> plain.Trained:
    return plain.train(model, piper.losses.huggingface, [batch()] * 2)


@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize("masked", [True, False], ids=["a divided mask", "a whole mask"])
def test_labels_of_the_next_position_come_from_the_next_device(attention: str, masked: bool) -> None:
    fields = FIELDS if masked else {name: 1 for name in FIELDS if name != "attention_mask"}
    job = piper.Job(
        model=model,
        loss=piper.losses.huggingface,
        data=lambda: [batch()],
        strategy=[
            piper.shard(piper.at(), [0, 1], axis="CP", batch=fields, attention=attention, balance="zigzag"),
            piper.split(piper.at(), parts=2),
        ],
        optimizer=plain.sgd,
        precision="fp64",
    )
    with piper.launch(piper.compile(job), on="inline") as run:
        losses = [run.step(batch()).loss for _ in range(2)]
        state = run.state_dict()
    assert losses == pytest.approx(alone().losses, rel=1e-9)
    assert plain.largest_difference(alone().state, state) < 1e-9
