"""An operation that fails inside a chunk is named by the line of the user's code that made it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import WorkerError

HERE = Path(__file__).name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])  # line 27


@pytest.mark.parametrize("on", ["inline", "local"])
def test_the_line_of_a_failed_operation(on: str) -> None:
    """`local` sends the code to another process, as text."""
    good, bad = ({"x": torch.ones(4, 8), "y": torch.full((4,), label)} for label in (3, 9))
    program = piper.compile(piper.Job(model=Net, loss=loss, data=lambda: [good]))
    with piper.launch(program, on=on) as run, pytest.raises(WorkerError) as caught:
        run.step(bad)
    assert caught.value.what == "IndexError: Target 9 is out of bounds."
    assert caught.value.facts["line"] == f"{HERE}:27"
    assert "Traceback (most recent call last)" in "".join(caught.value.__notes__)
