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
from benchmarks.ranks_titan import as_titan, weights_of
from benchmarks.ranks_titan_experts import with_neighbours
from piper.models.layers import rope, rotate
from tests import deepseek

ROOT = Path(gpu_systems.__file__).parents[1]
TOLERANCE = {"torchtitan": 2e-5, "megatron": 1e-6, "deepspeed": 1e-6}  # of float32 sums in another order
HEADS, HEAD_DIM, WIDTH, LENGTH = 2, 8, 16, 5


def neighbours_turned(x: Tensor, base: float) -> Tensor:
    """Turn features 2i and 2i + 1 of [heads, length, head_dim] together, as complex numbers."""
    angles = torch.arange(LENGTH)[:, None] / base ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
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


def test_latent_queries_meet_keys_as_before() -> None:
    torch.manual_seed(0)
    config = deepseek.Config.tiny()
    plain, turned, x = config.head_dim, config.rope_dim, torch.randn(LENGTH, WIDTH)
    rotation = rope(LENGTH, turned, 100.0, like=x)
    q, k = torch.randn(config.heads * (plain + turned), WIDTH), torch.randn(config.kv_rank + turned, WIDTH)

    def parts(weight: Tensor, heads: int) -> tuple[Tensor, ...]:
        by_head = (x @ weight.T).view(LENGTH, heads, -1).transpose(0, 1)
        return tuple(by_head.split([by_head.shape[-1] - turned, turned], dim=-1))

    (q_plain, q_turned), (latent, k_turned) = parts(q, config.heads), parts(k, 1)
    their_q_plain, their_q_turned = parts(with_neighbours(q, config, config.heads), config.heads)
    their_latent, their_k_turned = parts(with_neighbours(k, config, 1), 1)
    torch.testing.assert_close((their_q_plain, their_latent), (q_plain, latent))
    ours = rotate(q_turned, rotation) @ rotate(k_turned, rotation).mT
    theirs = neighbours_turned(their_q_turned, 100.0) @ neighbours_turned(their_k_turned, 100.0).mT
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize(
    ("row", "count"), [("qwen3_ep4", 4 * 12 + 3), ("deepseek_ep4", 4 * 9 + 3 + 3 * 7 + 3)]
)
def test_every_weight_of_experts_has_its_name(row: str, count: int) -> None:
    config = SIZES["tiny"].shapes[row].model
    named = weights_of(config)
    assert len(named) == count
    assert not {part for name in named for part in name.split(".")} & {"ffn", "gate_up", "down"}
    assert named["layers.3.moe.experts.w1"].shape == (8, 16, 32)
    assert named["layers.3.moe.experts.w2"].shape == (8, 32, 16)
    assert named["layers.3.moe.router.gate.weight"].shape == (8, 32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("package", "row", "systems"),
    [
        ("torchtitan", "qwen3_ep4", ["torchtitan"]),
        ("torchtitan", "deepseek_pp2_ep2", ["torchtitan"]),
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
        assert line["losses"] == pytest.approx(ours["losses"], rel=TOLERANCE[package])
        assert line["norm"] == pytest.approx(ours["norm"], rel=TOLERANCE[package])
