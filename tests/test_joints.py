"""Compilations of a test run share the traces of equal chunks, and of no others."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tests.joints
from piper.capture.autodiff import compose
from piper.capture.autodiff.differentiate import differentiate
from piper.capture.autodiff.joint import trace_joint
from piper.capture.trace.trace import trace
from tests import zoo
from tests.joints import SharedJoints

pytestmark = pytest.mark.usefixtures("own_captures")


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


class Cosine(Sine):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.layer(x))


class SineElsewhere(Sine):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


def traces(*models: Callable[[], nn.Module], rows: int = 4) -> int:
    """Return how many chunks are traced to differentiate some models of one chunk each."""
    with (
        patch.object(compose, "trace_joint", SharedJoints().trace),
        patch.object(tests.joints, "trace_joint", wraps=trace_joint) as traced,
    ):
        for model in models:
            differentiate(trace(model, zoo.regression, zoo.vectors(8, 0), rows))
    return traced.call_count


def test_equal_models_are_traced_once() -> None:
    assert traces(Sine, Sine, lambda: Sine()) == 1


def test_other_operations_and_the_same_operations_on_other_lines_are_traced() -> None:
    assert traces(Sine, Cosine, SineElsewhere) == 3


def test_this_run_shares_traces() -> None:
    assert isinstance(vars(compose)["trace_joint"].__self__, SharedJoints)
