"""`annotate_layers`: which blocks of an unmodified model become layers."""

from collections.abc import Callable
from inspect import cleandoc

import pytest
from torch import nn

import piper
from piper import ConfigError
from piper.capture.trace.annotate import listed_regions

transformers = pytest.importorskip("transformers", reason="needs transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


def layers(model: nn.Module) -> list[str]:
    assert piper.annotate_layers(model) is model
    regions = listed_regions(model)
    assert [region.tag for region in regions] == ["LAYER"] * len(regions)
    assert [region.mark[1] for region in regions] == [*range(len(regions))]
    return [region.where for region in regions]


class Mixed(nn.Module):
    """Two kinds of blocks in turn, a small stack in front of them, and blocks within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv1d(1, 1, 3) for _ in range(5))
        kinds = (lambda: nn.Linear(16, 16), lambda: nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)))
        self.blocks = nn.ModuleList(kinds[number % 2]() for number in range(4))


class Sides(nn.Module):
    """A vision and a language side of blocks of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.large = nn.Sequential(nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 99))


def llava(vision_layers: int) -> nn.Module:
    """A language model with a vision tower of as wide layers."""
    vision = transformers.CLIPVisionConfig(
        **SIZES | {"num_hidden_layers": vision_layers}, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**SIZES, vocab_size=8, num_key_value_heads=1)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=7)
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


FOUND: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, vocab_size=8, num_key_value_heads=1)
        ),
        ["model.layers.0", "model.layers.1"],
    ),
    (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=8)
        ),
        ["transformer.h.0", "transformer.h.1"],
    ),
    (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=8)),
        ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    ),
    (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=8)
        ),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    (
        lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)),
        ["layers.0", "layers.1"],
    ),
    (
        lambda: llava(vision_layers=2),
        ["model.language_model.layers.0", "model.language_model.layers.1"],
    ),
    (
        lambda: llava(vision_layers=12),  # which is then the largest stack
        ["model.language_model.layers.0", "model.language_model.layers.1"],
    ),
    (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    ),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), ["0", "2"]),
    (Mixed, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
    (Sides, ["small.0", "small.2", "large.0", "large.2"]),
]


@pytest.mark.parametrize(
    ("model", "paths"), FOUND,
    ids=["llama", "gpt2", "bert", "t5", "vit", "llava", "large-vision", "transformer", "sequential", "mixed", "sides"],
)  # fmt: skip
def test_the_repeated_blocks_are_layers(model: Callable[[], nn.Module], paths: list[str]) -> None:
    assert layers(model()) == paths


class Levels(nn.Module):
    """Two lists of blocks in a list, as vision models that halve their images have."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))


def test_lists_in_a_list_are_no_blocks() -> None:
    assert layers(Levels()) == ["levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"]


def test_a_projection_in_front_of_the_blocks_is_no_block() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
    assert layers(nn.Sequential(nn.Linear(2, 16), *blocks, nn.Linear(16, 2))) == ["1", "2"]


def test_what_blocks_share_makes_none_of_them_large() -> None:
    shared = nn.Linear(64, 64)
    small = [nn.Linear(16, 16) for _ in range(4)]
    hybrid = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), shared) for _ in range(8)]
    blocks = nn.ModuleList([*hybrid[:4], *small, *hybrid[4:]])
    assert layers(nn.Sequential(blocks)) == [f"0.{number}" for number in range(12)]


def test_a_model_without_repeated_layers() -> None:
    with pytest.raises(ConfigError) as caught:
        piper.annotate_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Embedding(4, 4)))
    assert str(caught.value) == cleandoc("""
        annotate_layers: Sequential has no repeated layers
          looked for: a ModuleList, Sequential or ModuleDict with two blocks of one class
          hint:       name its regions yourself: annotate_modules(model, {"LAYER": ["first", "second"]})
    """)


def test_a_model_is_annotated_once() -> None:
    model = piper.annotate_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ConfigError) as caught:
        piper.annotate_layers(model)
    assert str(caught.value) == cleandoc("""
        annotate_layers: the model has regions LAYER already
          hint: annotate a model once
    """)


def test_what_is_no_model() -> None:
    with pytest.raises(ConfigError) as caught:
        piper.annotate_layers(nn.Linear)  # type: ignore[arg-type]
    assert str(caught.value) == cleandoc("""
        annotate_layers: <class 'torch.nn.modules.linear.Linear'> is not a module
          hint: give it the model: annotate_layers(LlamaForCausalLM(config))
    """)
