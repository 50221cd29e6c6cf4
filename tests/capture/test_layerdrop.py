"""LayerDrop: with the probability 0 it is traced, above that it is refused."""

from collections.abc import Mapping
from types import SimpleNamespace

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


class ByConfig(Layers):
    """The same, as its encoders of speech are written: the probability is the configuration's, by a longer name."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__(0.5)
        self.config = SimpleNamespace(speech_encoder_layerdrop=layerdrop)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip_the_layer = self.training and dropout_probability < self.config.speech_encoder_layerdrop
            if not skip_the_layer:
                x = layer(x)
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"]).square().mean()
    return result


def job(layers: type[Layers], layerdrop: float) -> piper.Job:
    data = [{"x": torch.ones(4, 4)}]
    return piper.Job(model=lambda: layers(layerdrop), loss=loss, data=lambda: data, precision="fp64")


@pytest.mark.parametrize("layers", [Layers, ByConfig])
def test_nothing_is_dropped(layers: type[Layers]) -> None:
    made = job(layers, 0.0)
    torch.manual_seed(0)
    wanted = loss(layers(0.0).double(), {"x": torch.ones(4, 4, dtype=torch.float64)}).item()
    with piper.launch(piper.compile(made), on="inline") as run:
        assert run.step(made.data()[0]).loss == pytest.approx(wanted, rel=1e-12)  # type: ignore[index]
    assert torch.rand([]).shape == (), "torch draws as before"


@pytest.mark.parametrize(("layers", "name"), [(Layers, "layerdrop"), (ByConfig, "speech_encoder_layerdrop")])
def test_layers_that_are_skipped(layers: type[Layers], name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        piper.compile(job(layers, 0.1))
    facts = {"module:": layers.__name__, f"{name}:": "0.1"}
    hint = f"set its probability to 0 in the model's configuration ({name}=0.0): "
    facts["hint:"] = hint + "a plan runs the same layers in every step"
    width = max(len(fact) for fact in facts)
    assert str(caught.value).partition(": ")[2] == lines(
        "LayerDrop skips layers by chance",
        *(f"  {fact:<{width}} {text}" for fact, text in facts.items()),
    )
