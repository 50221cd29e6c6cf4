"""What `benchmarks/gpu_systems.py` gives to other systems: TorchTitan's weights under its conventions, and our numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_systems
from benchmarks.ranks_rows import ROWS, SIZES, model_of
from benchmarks.ranks_titan import as_titan
from piper.models.layers import rope, rotate

ROOT = Path(gpu_systems.__file__).parents[1]
HEADS, HEAD_DIM, WIDTH, LENGTH = 2, 8, 16, 5


def neighbours_turned(x: Tensor, base: float) -> Tensor:
    """Turn features 2i and 2i + 1 of [heads, length, head_dim] together, as complex numbers."""
    angles = torch.arange(LENGTH)[:, None] / base ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def test_queries_meet_keys_as_before() -> None:
    torch.manual_seed(0)
    weights = {f"layers.3.attention.{name}.weight": torch.randn(HEADS * HEAD_DIM, WIDTH) for name in "qk"}
    theirs = as_titan(weights, HEAD_DIM)
    assert [*theirs] == ["layers.3.attention.wq.weight", "layers.3.attention.wk.weight"]
    x = torch.randn(LENGTH, WIDTH)

    def heads(weight: Tensor) -> Tensor:
        return (x @ weight.T).view(LENGTH, HEADS, HEAD_DIM).transpose(0, 1)

    rotation = rope(LENGTH, HEAD_DIM, 100.0, like=x)
    q, k = (rotate(heads(weight), rotation) for weight in weights.values())
    their_q, their_k = (neighbours_turned(heads(weight), 100.0) for weight in theirs.values())
    torch.testing.assert_close(their_q @ their_k.mT, q @ k.mT)


def test_every_weight_has_its_name() -> None:
    config = SIZES["tiny"].shapes[ROWS["fsdp"].name].model
    names = [*as_titan(model_of(config).state_dict(), config.head_dim)]
    assert len({*names}) == 8 * 9 + 3
    assert {name for name in names if "layers.7." in name} == {
        f"layers.7.{name}.weight"
        for name in (
            *(f"attention.w{one}" for one in "qkvo"),
            *(f"feed_forward.w{one}" for one in "123"),
            "attention_norm",
            "ffn_norm",
        )
    }
    assert {name for name in names if "layers" not in name} == {
        "tok_embeddings.weight",
        "norm.weight",
        "output.weight",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("package", "row", "systems"),
    [
        ("megatron", "tp4", ["megatron"]),
        ("megatron", "interleaved", ["megatron"]),
        ("megatron", "pp2_fsdp2", ["megatron_zero1"]),
        ("deepspeed", "fsdp", ["deepspeed_zero2", "deepspeed_zero3"]),
    ],
)
def test_a_system_has_our_numbers(tmp_path: Path, package: str, row: str, systems: list[str]) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    out = tmp_path / "out.jsonl"
    words = ["--device", "cpu", "--size", "tiny", "--eager", "--steps", "4", "--rows", row]
    words += ["--systems", ",".join(systems), "--out", str(out), "--cache", str(tmp_path / "cache")]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu_systems", *words], cwd=ROOT, check=True)
    *theirs, ours = (json.loads(line) for line in out.read_text().splitlines())
    assert [line["side"] for line in (*theirs, ours)] == [*systems, "piper"]
    for line in theirs:
        assert "error" not in line, line["error"]
        assert line["losses"] == pytest.approx(ours["losses"], rel=1e-6)
        assert line["norm"] == pytest.approx(ours["norm"], rel=1e-6)
