"""The weights that `benchmarks/ranks_megatron.py` gives to Megatron-Core: the same function under its conventions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ranks_megatron import as_megatron, globally
from benchmarks.ranks_rows import model_of
from piper.models import decoder

CONFIG = decoder.Config(vocab=12, dim=16, layers=2, heads=8, kv_heads=4, head_dim=2, hidden=24)
LAYER = "decoder.layers.1."


@pytest.fixture
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return model_of(CONFIG).state_dict()


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_the_parts_of_all_ranks_compute_what_the_whole_does(state: dict[str, Tensor], ways: int) -> None:
    x = torch.randn(5, CONFIG.dim)
    parts = [as_megatron(state, CONFIG, ways, rank) for rank in range(ways)]

    # As Megatron splits the rows of a key and value head: its query heads, its key, its value.
    groups = [F.linear(x, part[f"{LAYER}self_attention.linear_qkv.weight"]) for part in parts]
    whole = torch.cat([each.view(5, CONFIG.kv_heads // ways, -1) for each in groups], 1)
    sizes = [CONFIG.heads // CONFIG.kv_heads * CONFIG.head_dim, CONFIG.head_dim, CONFIG.head_dim]
    for name, found in zip("qkv", whole.split(sizes, -1), strict=True):
        expected = F.linear(x, state[f"layers.1.attention.{name}.weight"])
        torch.testing.assert_close(found.flatten(1), expected)

    def fed_forward(part: dict[str, Tensor]) -> Tensor:
        gate, up = F.linear(x, part[f"{LAYER}mlp.linear_fc1.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, part[f"{LAYER}mlp.linear_fc2.weight"])

    gate, up, down = (state[f"layers.1.ffn.{name}.weight"] for name in ("gate", "up", "down"))
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.testing.assert_close(torch.stack([fed_forward(part) for part in parts]).sum(0), expected)

    heads = torch.randn(5, CONFIG.heads * CONFIG.head_dim)
    projected = [
        F.linear(one, part[f"{LAYER}self_attention.linear_proj.weight"])
        for one, part in zip(heads.chunk(ways, 1), parts, strict=True)
    ]
    out = state["layers.1.attention.out.weight"]
    torch.testing.assert_close(torch.stack(projected).sum(0), F.linear(heads, out))
    for theirs, ours in (("embedding.word_embeddings", "embedding"), ("output_layer", "head")):
        found = torch.cat([part[f"{theirs}.weight"] for part in parts])
        torch.testing.assert_close(found, state[f"{ours}.weight"])


def test_every_weight_is_taken_once(state: dict[str, Tensor]) -> None:
    named = as_megatron(state, CONFIG, 1, 0)
    assert sum(value.numel() for value in named.values()) == sum(value.numel() for value in state.values())
    assert len(named) == 3 + 6 * CONFIG.layers


def test_a_stage_names_its_layers_from_zero() -> None:
    numbers = [4, 5]
    assert (
        globally("decoder.layers.1.mlp.linear_fc1.weight", numbers)
        == "decoder.layers.5.mlp.linear_fc1.weight"
    )
    assert globally("output_layer.weight", numbers) == "output_layer.weight"
