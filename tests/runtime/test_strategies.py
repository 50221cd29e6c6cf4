"""Stock Hugging Face models under `piper.strategies`, against plain PyTorch on one device in fp64."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import at, place, replicate, schedules, split, strategies
from piper.directives import Directive
from piper.run.launch import launch_inline
from tests import plain

transformers = pytest.importorskip("transformers", reason="needs transformers")
EXACT = 1e-11
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=4, num_key_value_heads=1)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Result(NamedTuple):
    """What a model returns, as those of transformers do."""

    logits: Tensor


class Blocks(nn.Module):
    """Four linear blocks between an embedding and a head: quick to capture."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: Tensor) -> Result:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return Result(self.head(hidden))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SIZES, num_hidden_layers=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=3, image_size=8,
        patch_size=4, num_channels=1, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def mixture(layers: int = 4) -> nn.Module:
    from piper.models import huggingface

    huggingface.register_experts()
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_hidden_layers=layers, num_key_value_heads=1, head_dim=8, moe_intermediate_size=8, num_experts=4,
        num_experts_per_tok=2, experts_implementation=huggingface.NAME,
    )  # fmt: skip
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model


def token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def both_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["labels"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def image_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    pixels = batch["tokens"].double().repeat_interleave(8, dim=1).view(-1, 1, 8, 8) / 32
    return nn.functional.cross_entropy(model(pixel_values=pixels).logits, batch["labels"][:, 0] % 5)


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(3)
    numbers = (torch.randint(32, (2, 16, 8), generator=draws) for _ in range(count))
    return [{"tokens": tokens, "labels": labels} for tokens, labels in numbers]


def difference(
    model: Callable[[], nn.Module],
    strategy: list[Directive],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] = token_loss,
) -> float:
    """Return the largest difference of any loss and of any parameter after two steps."""
    wanted = plain.train(model, loss, batches())
    job = piper.Job(
        model=lambda: piper.annotate_layers(model()),
        loss=loss,
        data=batches,
        strategy=strategy,
        optimizer=plain.sgd,
        precision="fp64",
    )
    with launch_inline(piper.compile(job, device="cpu")) as run:
        losses = [run.step(batch).loss for batch in batches()]
        state = plain.largest_difference(wanted.state, run.state_dict())
    return max(state, *(abs(a - b) for a, b in zip(wanted.losses, losses, strict=True)))


def test_a_pipeline_of_layers() -> None:
    strategy = strategies.pipeline(layers=4, pp=2, dp=2, zero=3, schedule="1f1b", microbatches=4)
    assert difference(llama, strategy) < EXACT


FSDP, DDP = strategies.fsdp(dp=4), strategies.ddp(dp=2, microbatches=2)


@pytest.mark.parametrize("strategy", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_data_parallelism(strategy: list[Directive]) -> None:
    assert difference(Blocks, strategy) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_data_parallelism_of_a_stock_model(strategy: list[Directive]) -> None:
    assert difference(llama, strategy) < EXACT


def test_boundaries_move_without_a_change_of_the_model() -> None:
    stages = [at(LAYER=0), at(LAYER=range(1, 4))]
    strategy: list[Directive] = [
        place(stages[0], [0]),
        replicate(stages[1], [1, 2], zero=1),
        split(at(), parts=2),
        *schedules.one_f_one_b(stages=2, microbatches=2, stage=stages),
    ]
    assert difference(Blocks, strategy) < EXACT


def test_experts_divided_over_a_pipeline() -> None:
    strategy = strategies.moe(layers=2, dp=2, ep=2, pp=2, zero=1, microbatches=2)
    assert difference(lambda: mixture(layers=2), strategy) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        strategies.moe(layers=4, dp=4, ep=2, zero=3),
        strategies.moe(layers=4, dp=2, pp=2, schedule="dualpipe-v"),
    ],
)
def test_experts_divided(strategy: list[Directive]) -> None:
    assert difference(mixture, strategy) < EXACT


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "dualpipe-v"])
def test_schedules_with_several_stages_on_a_rank(schedule: str) -> None:
    assert (
        difference(Blocks, strategies.pipeline(4, pp=2, dp=2, zero=3, schedule=schedule, microbatches=4))
        < EXACT
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["gpipe", "zero-bubble", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipe-v"]
)
def test_every_schedule_over_layers(schedule: str) -> None:
    strategy = strategies.pipeline(layers=4, pp=2, dp=2, zero=2, schedule=schedule, microbatches=4)
    assert difference(llama, strategy) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layers", "loss"),
    [(gpt2, 3, token_loss), (bert, 3, token_loss), (t5, 4, both_loss), (vit, 3, image_loss)],
)
def test_stock_models(
    model: Callable[[], nn.Module], layers: int, loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
) -> None:
    strategy = strategies.pipeline(layers=layers, pp=2, dp=2, zero=3, microbatches=2)
    assert difference(model, strategy, loss) < EXACT
