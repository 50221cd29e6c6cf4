"""The models that tests run: tiny, built the same way each time, and fit for fp64.

case = zoo.case("moe")
model, batch = zoo.build(case, dtype=torch.float64), case.batch(8, 0)
case.loss(model, batch)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate, annotate_modules
from piper.losses import IGNORED, cross_entropy
from piper.models import causal, decoder, huggingface, moe
from tests import deepseek

VOCAB, LENGTH = 64, 12
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with its loss and its data."""

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, int], Batch]  # (rows, seed)
    stages: int  # regions PP=0 ... PP=stages-1
    experts: int = 0  # per region EP; 0: no such region
    tied: bool = False
    random: bool = False  # the forward draws random numbers
    mixes_samples: bool = False  # a slice of the batch is not the batch: BatchNorm, a balanced router


def build(case: Case, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The case's model for a seed. Its values are those of fp32 whatever the type."""
    torch.manual_seed(seed)
    return case.model().to(dtype)


def tokens(rows: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=rng)
    return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def uneven_tokens(rows: int, seed: int) -> Batch:
    """Every row has another number of labels; some have none."""
    batch = tokens(rows, seed)
    rng = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(0, LENGTH + 1, (rows, 1), generator=rng)
    lengths[0] = LENGTH
    labels = batch["labels"].masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    return {**batch, "labels": labels}


def two_sequences(rows: int, seed: int) -> Batch:
    return {**tokens(rows, seed), "source": tokens(rows, seed + 1)["tokens"]}


def vectors(rows: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 16, generator=rng), "y": torch.randn(rows, 4, generator=rng)}


def images(rows: int, seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 3, 8, 8, generator=rng), "y": torch.randint(0, 5, (rows,), generator=rng)}


class MLP(nn.Module):
    """Linear layers, one stage each."""

    def __init__(self, stages: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [16] * stages + [4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = self.dropout(torch.tanh(layer(x)))
        return x


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, one stage each: buffers that the forward changes."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
            )
            for i in range(stages)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class CrossAttention(nn.Module):
    """A decoder layer that also looks at the encoder's output."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.own = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.own(h, h, h, attn_mask=mask, need_weights=False)[0]
        x = x + self.cross(self.norms[1](x), memory, memory, need_weights=False)[0]
        result: Tensor = x + self.ffn(self.norms[2](x))
        return result


class EncoderDecoder(nn.Module):
    """The encoder is stage 0; every later stage is two decoder layers that use the encoder's output."""

    def __init__(self, stages: int, dim: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, dim), nn.Embedding(VOCAB, dim)
        self.encoder = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim)
        )
        self.decoder = nn.ModuleList(CrossAttention(dim) for _ in range(2 * (stages - 1)))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        with annotate("PP"):
            memory = self.encoder(self.source(source))
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        x = target
        for first in range(0, len(self.decoder), 2):
            with annotate("PP"):
                x = self.target(x) if first == 0 else x
                x = self.decoder[first](x, memory, mask)
                x = self.decoder[first + 1](x, memory, mask)
        logits: Tensor = self.head(x)
        return logits


def regression(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    wanted = next(model.parameters()).dtype  # a batch is fp32 whatever the model's type
    return F.mse_loss(model(batch["x"].to(wanted)), batch["y"].to(wanted))


def classification(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"].to(next(model.parameters()).dtype)), batch["y"])


def translation(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return causal.mean_cross_entropy(model(batch["source"], batch["tokens"]), batch["labels"])


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes))
    return model


def paired(layers: int, stages: int) -> list[list[str]]:
    """The layers of each stage of a Hugging Face model."""
    return [[f"model.layers.{i}" for i in stage] for stage in causal.stage_ranges(layers, stages)]


def hf_sizes(layers: int) -> dict[str, int | bool]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
    }


def llama(stages: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**hf_sizes(stages)))
    return annotate_modules(model, {"PP": paired(stages, stages)})


def qwen3(stages: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = layers_in(stages)
    model = Qwen3ForCausalLM(Qwen3Config(**hf_sizes(layers), tie_word_embeddings=True))
    return annotate_modules(model, {"PP": paired(layers, stages)})


def qwen3_moe(stages: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    huggingface.register_experts()
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **hf_sizes(stages),
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            experts_implementation=huggingface.NAME,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # spread the tokens, so that counts are uneven
            nn.init.normal_(parameter, std=0.5)
    return annotate_modules(model, {"PP": paired(stages, stages), "EP": ["model.layers.*.mlp.experts"]})


def layers_in(stages: int) -> int:
    """Two layers a stage; in long pipelines, which many tests run, one."""
    return 2 * stages if stages < 4 else stages


def dense(stages: int, *, tied: bool = False) -> Callable[[], nn.Module]:
    return lambda: decoder.Decoder(decoder.Config.tiny(layers=layers_in(stages), stages=stages, tied=tied))


def sparse(stages: int) -> Callable[[], nn.Module]:
    return lambda: moe.MoEDecoder(moe.Config.tiny(layers=stages, stages=stages))


def latent(stages: int) -> Callable[[], nn.Module]:
    """Build layers with experts in every stage; the dense layer that comes first has to share one with them."""
    sizes = deepseek.Config.tiny(layers=layers_in(stages), stages=stages)
    return lambda: deepseek.DeepSeekDecoder(replace(sizes, dense_layers=1 if stages < 4 else 0))


def partly_frozen(stages: int) -> nn.Module:
    return freeze(dense(stages)(), "embedding", "layers.0", f"layers.{layers_in(stages) - 1}.ffn")


def frozen_stage(stages: int) -> nn.Module:
    return freeze(dense(stages)(), "embedding", "layers.0", "layers.1")


def _plain(model: Callable[[], nn.Module], stages: int, *, random: bool = False) -> Case:
    return Case(name="", model=model, loss=regression, batch=vectors, stages=stages, random=random)


def _words(model: Callable[[], nn.Module], stages: int, *, tied: bool = False, experts: int = 0) -> Case:
    return Case(
        name="", model=model, loss=decoder.loss, batch=tokens, stages=stages, tied=tied, experts=experts
    )


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of a Hugging Face model."""
    logits: Tensor = model(input_ids=batch["tokens"], use_cache=False).logits
    return causal.mean_cross_entropy(logits, batch["labels"])


def _hf(model: Callable[[int], nn.Module], stages: int, *, tied: bool = False, experts: int = 0) -> Case:
    return replace(_words(lambda: model(stages), stages, tied=tied, experts=experts), loss=mean_loss)


_CASES: Mapping[str, Callable[[int], Case]] = MappingProxyType(
    {
        "mlp": lambda n: _plain(lambda: MLP(n), n),
        "dropout": lambda n: _plain(lambda: MLP(n, dropout=0.25), n, random=True),
        "decoder": lambda n: _words(dense(n, tied=True), n, tied=True),
        "decoder_untied": lambda n: _words(dense(n), n),
        "moe": lambda n: _words(sparse(n), n, experts=8),
        "deepseek": lambda n: replace(_words(latent(n), n, experts=8), mixes_samples=True),
        "llama_hf": lambda n: _hf(llama, n),
        "qwen3_hf": lambda n: _hf(qwen3, n, tied=True),
        "qwen3_moe_hf": lambda n: _hf(qwen3_moe, n, experts=8),
        "frozen": lambda n: _words(lambda: partly_frozen(n), n),
        "frozen_stage": lambda n: _words(lambda: frozen_stage(n), n),
        "sum_weight": lambda n: replace(_words(dense(n), n), loss=decoder.token_loss, batch=uneven_tokens),
        "encoder_decoder": lambda n: replace(
            _words(lambda: EncoderDecoder(n), n), loss=translation, batch=two_sequences
        ),
        "convnet": lambda n: replace(
            _plain(lambda: ConvNet(n), n), loss=classification, batch=images, mixes_samples=True
        ),
    }
)
NAMES = tuple(_CASES)


def masked(case: Case, mask: str) -> Case:
    """A case of transformers that pads its rows, or packs two documents into each."""

    def batch(rows: int, seed: int) -> Batch:
        made = case.batch(rows, seed)
        lengths = torch.randint(2, LENGTH, (rows, 1), generator=torch.Generator().manual_seed(seed + 2))
        first = torch.arange(LENGTH) < lengths
        if mask == "padding":
            return {
                **made,
                "mask": first.long(),
                "labels": made["labels"].masked_fill(~first, IGNORED),
            }
        return {**made, "mask": first.long()}  # which of the two documents a token belongs to

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = batch["mask"]
        if mask == "documents":
            order = torch.arange(LENGTH, device=given.device)
            given = (given[:, None, :, None] == given[:, None, None, :]) & (order[:, None] >= order)
        logits = model(input_ids=batch["tokens"], attention_mask=given, use_cache=False).logits
        return cross_entropy(logits, batch["labels"])

    return replace(case, name=f"{case.name} {mask}", batch=batch, loss=loss)


def case(name: str, stages: int | None = None) -> Case:
    """The named case, cut into that many stages: by default as few as show what it is for."""
    few = 3 if name == "encoder_decoder" else 2  # 3: two stages use the encoder's output
    return replace(_CASES[name](stages or few), name=name)
