"""LayerDrop: with the probability 0 it is traced, above that it is refused."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.errors import CaptureError
from tests.capture.test_errors import lines


class Layers(nn.Module):
    """Layers that are skipped by chance, as Hugging Face writes it."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    continue
            x = layer(x)
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


def job(layerdrop: float) -> piper.Job:
    data = [{"x": torch.ones(4, 4)}]
    return piper.Job(model=lambda: Layers(layerdrop), loss=loss, data=lambda: data, precision="fp64")


def test_nothing_is_dropped() -> None:
    made = job(0.0)
    torch.manual_seed(0)
    wanted = loss(Layers(0.0).double(), {"x": torch.ones(4, 4, dtype=torch.float64)}).item()
    with piper.launch(piper.compile(made), on="inline") as run:
        assert run.step(made.data()[0]).loss == pytest.approx(wanted, rel=1e-12)  # type: ignore[index]
    assert torch.rand([]).shape == (), "torch draws as before"


def test_layers_that_are_skipped() -> None:
    with pytest.raises(CaptureError) as caught:
        piper.compile(job(0.1))
    assert str(caught.value).partition(": ")[2] == lines(
        "LayerDrop skips layers by chance",
        "  module:    Layers",
        "  layerdrop: 0.1",
        "  hint:      set its probability to 0 in the model's configuration (layerdrop=0.0): "
        "a plan runs the same layers in every step",
    )
