"""`piper train --on rank:N`: what is said of one device's steps."""

import re
from pathlib import Path

import pytest

from piper.errors import ConfigError
from piper.train.train_command import train_alone
from piper.train.train_options import TrainOptions

RECIPE = f"{Path(__file__).parents[2] / 'recipes' / 'dense.py'}:zero"


def test_the_time_of_a_step_and_its_memory() -> None:
    told = train_alone(TrainOptions(recipe=RECIPE, on="rank:1", steps=3, device="cpu", cluster="h100"))
    assert re.fullmatch(
        r"rank:1 of 2, on h100: [\d.]+ ms a step \(median of 1\)\n"
        r"  memory: [\d.]+ MiB planned, [\d.]+ MiB with streams side by side\n",
        str(told),
    )


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError) as caught:
        train_alone(TrainOptions(recipe=RECIPE, on="rank:0", steps=2))
    assert str(caught.value) == "rank:0: --steps 2\n  hint: the first 2 are not timed: take 3 or more"
