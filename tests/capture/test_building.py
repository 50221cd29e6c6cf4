"""Models are built without memory, whatever their constructors do with tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import piper
from piper.capture.trace.build_model import build_fake


class Converted(nn.Module):
    """Modules that are converted while the model is built, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(2, 2).to(torch.float32)
        self.lower = nn.Linear(2, 2).bfloat16()
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.lower.weight
        self.elsewhere = nn.Parameter(torch.empty(2, 2, device="cuda"))  # as a model names its device
        self.lower.float()


def test_a_constructor_may_convert_modules() -> None:
    model = build_fake(Converted, FakeTensorMode(), torch.float64, torch.device("cpu"))
    parameters: list[torch.Tensor] = [*model.parameters()]
    assert len(parameters) == 6
    assert {(type(p), p.dtype, p.device.type, p.requires_grad) for p in parameters} == {
        (FakeTensor, torch.float64, "cpu", True)
    }
    made: Any = model
    assert made.tied.weight is made.lower.weight


@pytest.mark.parametrize(
    "initialise",
    [
        lambda w: nn.init.trunc_normal_(w, std=0.5),
        lambda w: nn.init.sparse_(w, 0.5),
        lambda w: w.div_(w.std().item()),
        lambda w: w.copy_(torch.linalg.svd(w)[0]),
    ],
    ids=["trunc_normal_", "sparse_", "item", "svd"],
)
def test_initial_values_are_those_of_plain_pytorch(initialise: Any) -> None:  # noqa: ANN401
    def model() -> nn.Module:
        made = nn.Linear(4, 4)
        with torch.no_grad():
            initialise(made.weight)
        return made

    job = piper.Job(
        model=model,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        seed=3,
    )
    torch.manual_seed(3)
    wanted = model().state_dict()
    with piper.launch(piper.compile(job)) as run:
        found = run.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_pretrained_weights_start_a_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1))
    saved.save_pretrained(tmp_path)
    tokens = torch.arange(32).view(4, 8) % 16
    batch = {"input_ids": tokens, "labels": tokens}
    job = piper.Job(
        model=lambda: transformers.LlamaForCausalLM.from_pretrained(tmp_path),
        loss=piper.losses.huggingface,
        data=lambda: [batch],
        strategy=piper.strategies.fsdp(dp=2),
        precision="fp64",
    )
    with piper.launch(piper.compile(job)) as run:
        found, result = run.state_dict(), run.step(batch)
    assert all(torch.equal(found[name], value.double()) for name, value in saved.state_dict().items())
    loss = saved.double()(**batch).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(saved.parameters(), float("inf")).item()
    # transformers computes norms and softmax in float32
    assert (result.loss, result.grad_norm) == pytest.approx((loss.item(), norm), rel=1e-6)


def loaded_file(file: Path) -> dict[str, torch.Tensor]:
    return load_file(file)


def opened_file(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not iterable


def sliced_file(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name)[:] for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("read", [loaded_file, opened_file, sliced_file])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_constructor_may_read_safetensors(read: Any, dtype: torch.dtype, tmp_path: Path) -> None:  # noqa: ANN401
    values = {
        "weight": torch.arange(8.0).view(2, 4).to(dtype),
        "bias": torch.tensor([0.5, -1.0], dtype=dtype),
    }
    save_file(values, tmp_path / "weights.safetensors")

    def model() -> nn.Module:
        made = nn.Linear(4, 2)
        made.load_state_dict(read(tmp_path / "weights.safetensors"))
        return made

    fake = build_fake(model, FakeTensorMode(), torch.float32, torch.device("cpu"))
    parameters: list[torch.Tensor] = [*fake.parameters()]
    assert {type(p) for p in parameters} == {FakeTensor}, "no memory is taken"
    job = piper.Job(
        model=model,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
    )
    with piper.launch(piper.compile(job), on="inline") as run:
        state = run.state_dict()
    assert all(torch.equal(state[name], value.float()) for name, value in values.items())


class Positions(nn.Module):
    """Adds a table that is a view, as the tutorials of torch write it, and that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(6, 4)
        table[:, 0] = torch.arange(6.0) / 7
        self.inner, self.head = nn.Identity(), nn.Linear(4, 4)
        self.register_buffer("table", table.unsqueeze(0))
        self.inner.register_buffer("table", self.table)
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.inner(x + self.table[:, : x.shape[1]])
        y: torch.Tensor = self.head(x + self.inner.get_buffer("table"))
        return y


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_buffer_may_be_a_view(precision: Literal["fp64", "bf16"]) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ANN401
        y: torch.Tensor = model(batch["x"]).square().mean()
        return y

    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[precision]
    batch = {"x": torch.linspace(-1, 1, 96).view(4, 6, 4).to(dtype)}
    strategy = [piper.replicate(piper.at(), [0, 1], zero=3)]
    job = piper.Job(model=Positions, loss=loss, data=lambda: [batch], strategy=strategy, precision=precision)
    torch.manual_seed(0)
    wanted = loss(Positions().to(dtype), batch).item()
    with piper.launch(piper.compile(job)) as run:
        assert run.step(batch).loss == pytest.approx(wanted, rel=1e-12 if precision == "fp64" else 1e-2)
        saved = run.state_dict()
    assert torch.equal(saved["table"], saved["inner.table"]) and saved["table"].shape == (1, 6, 4)


def test_a_backbone_records_each_layer_once() -> None:
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, Dinov2Config

    def model() -> nn.Module:
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "mlp_ratio": 1}
        features = {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
        seen = Dinov2Config(**layers, **features, image_size=4, patch_size=2)
        sizes = {"reassemble_hidden_size": 8, "neck_hidden_sizes": [4, 4], "fusion_hidden_size": 4}
        head = {"head_hidden_size": 4, "reassemble_factors": [1, 1], "patch_size": 2}
        made: nn.Module = DepthAnythingForDepthEstimation(
            DepthAnythingConfig(backbone_config=seen, **sizes, **head)
        )
        return made

    def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        seen: Any = model.backbone
        of_layers: list[torch.Tensor] = seen(batch["pixel_values"]).feature_maps
        return torch.stack(of_layers).pow(3).mean()

    batch = {"pixel_values": torch.randn(2, 3, 4, 4, dtype=torch.float64)}
    job = piper.Job(model=model, loss=loss, data=lambda: [batch], strategy=[], precision="fp64")
    with piper.launch(piper.compile(job, device="cpu"), on="inline") as run:
        plain = model().double()
        plain.load_state_dict(run.state_dict())
        assert run.step(batch).loss == pytest.approx(loss(plain, batch).item(), rel=1e-12)
