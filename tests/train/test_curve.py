"""The quality of the training itself: a composed strategy's loss curve lies on plain PyTorch's."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

import piper
from piper.recipe import load_recipe
from piper.run.launch import launch
from tests.recipes.test_recipes import RECIPES

TOLERANCE = 1e-4


def plain_curve(job: piper.Job, steps: int) -> list[float]:
    """Single-device training as anyone would write it."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    losses = []
    for batch in islice(job.data(), steps):
        found = job.loss(model, batch)
        assert isinstance(found, tuple), "the recipe's loss is a sum over tokens, and their number"
        total, count = found
        assert isinstance(total, torch.Tensor) and isinstance(count, torch.Tensor)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        assert job.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dense_recipe_under_a_composed_strategy() -> None:
    job = load_recipe(f"{RECIPES / 'dense.py'}:single")
    strategy: list[piper.Directive] = [
        piper.replicate(piper.at(PP=0), [0, 1], zero=3),
        piper.replicate(piper.at(PP=1), [2, 3], zero=2),
        piper.split(piper.at(), axis="MB", parts=4),
        *piper.schedules.one_f_one_b(2, 4),
    ]
    wanted = plain_curve(job, job.steps)
    program = piper.compile(replace(job, strategy=strategy))
    with launch(program, on="inline") as run:
        got = [run.step(batch).loss for batch in islice(job.data(), job.steps)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))
    assert len(got) == 200 and got[-1] < 0.6 * got[0]
    assert worst < TOLERANCE, f"{worst:.2e} apart"
