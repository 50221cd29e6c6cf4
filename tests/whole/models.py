"""The models of whole jobs, each with its loss for Piper and the same loss in plain PyTorch.

A family has four layers in any number of stages, which changes no parameter: a run that resumes may have other stages.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import piper
from piper.models import causal, decoder, huggingface, moe
from piper.models.huggingface import tensor_plan
from tests.runtime import packed
from tests.runtime import test_vocabulary_losses as vocabulary
from tests.runtime.divided import GPT2, SIZES, VOCAB, staged

LAYERS, LENGTH, SAMPLES = 4, 16, 24
Batch = Mapping[str, Tensor]
TOKENS = ("tokens", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model, and what its strategies and its comparison need of it."""

    build: Callable[[int], nn.Module]  # of the number of stages
    loss: Callable[[Any, Batch], tuple[Tensor, Tensor]]
    forward: Callable[[Any, Batch], Tensor]  # what `run.predict` returns
    weights: Mapping[str, int]  # that tensor parallelism shards
    fields: tuple[str, ...] = TOKENS  # that lie along the sequence
    plain: Callable[[], nn.Module] | None = None  # the same parameters in another model. None: `build(1)`
    plain_forward: Callable[[Any, Batch], Tensor] | None = None  # None: `forward`
    plain_loss: Callable[[Any, Batch], tuple[Tensor, Tensor]] | None = (
        None  # None: cross entropy of the forward
    )
    instead: Callable[[], AbstractContextManager[object]] = (
        nullcontext  # replaces our code while plain PyTorch runs
    )
    stages: int | None = None  # the only number of stages. None: any


class CastUp(TorchFunctionMode):
    """Casts to float64 wherever a model casts to float32, as sharded models do in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def angles_in_float64(length: int, head_dim: int, base: float, like: Tensor) -> Tensor:
    """Return our decoders' rotation of each position, which they compute in float32 unless they are sharded."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(length, dtype=torch.float64)[:, None] / base**steps
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def wide_angles() -> AbstractContextManager[object]:
    """Let a layout that is sharded and one that is not have the same angles."""
    return patch.object(causal, "rope", angles_in_float64)


def rows() -> dict[str, Tensor]:
    """Return all samples: tokens and labels, the documents of each row, and a number of the sample."""
    draws = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(packed.VOCAB, (2, SAMPLES, LENGTH), generator=draws)
    labels[::3, :5] = -100
    packings = [*packed.PACKINGS["several"], *packed.PACKINGS["single tokens"], [16], [4, 4, 8]]
    marks = packed.batch([packings[i % len(packings)] for i in range(SAMPLES)])
    return {**marks, "tokens": tokens, "labels": labels, "id": torch.arange(SAMPLES)}


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flat = labels.flatten()
    return F.cross_entropy(logits.flatten(0, -2), flat, reduction="sum"), (flat >= 0).sum()


def tokens_of(model: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, model(batch["tokens"]))


def stock_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, model(input_ids=batch["tokens"], use_cache=False).logits)


def stock_documents(model: nn.Module, batch: Batch) -> Tensor:
    output = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False)
    return cast(Tensor, output.logits)


def documents_of(model: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, model(*(batch[name] for name in packed.NAMES)))


def dense(stages: int) -> nn.Module:
    return decoder.Decoder(decoder.Config.tiny(layers=LAYERS, stages=stages))


def sparse(stages: int) -> nn.Module:
    return moe.MoEDecoder(moe.Config.tiny(layers=LAYERS, stages=stages))


def gpt2(stages: int, activation: str = "gelu_new") -> nn.Module:
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "activation_function": activation}
    sizes = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=LAYERS, n_head=4, **drops
    )
    return staged(transformers.GPT2LMHeadModel(sizes), stages, LAYERS, "transformer.h")


def stock_experts(stages: int, implementation: str = huggingface.NAME) -> nn.Module:
    huggingface.register_experts()
    sizes = transformers.Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=LAYERS,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )
    model = transformers.Qwen3MoeForCausalLM(sizes)
    for name, parameter in model.named_parameters():
        if "mlp.gate" in name:
            nn.init.normal_(parameter, std=0.5)  # far from uniform: counts are uneven
    each = LAYERS // stages
    regions = [[f"model.layers.{s * each + i}" for i in range(each)] for s in range(stages)]
    return piper.annotate_modules(model, {"PP": regions, "EP": ["model.layers.*.mlp.experts"]})


def each_expert(self: moe.SparseFeedForward, x: Tensor) -> Tensor:
    """Send every token through every expert, and keep what its router chose."""
    scores = torch.softmax(x @ self.router.weight.T, -1)
    best = scores.topk(self.top_k, dim=-1)
    kept = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    gate, up = torch.einsum("bld,edh->bleh", x, self.gate_up).chunk(2, dim=-1)
    out = torch.einsum("bleh,ehd->bled", gate * torch.sigmoid(gate) * up, self.down)
    return (out * kept[..., None]).sum(-2)


def llama(stages: int, attention: str = "flex_attention") -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS, attn_implementation=attention)
    return staged(transformers.LlamaForCausalLM(config), stages, LAYERS, "model.layers")


def one_document(model: packed.Packed, batch: Batch) -> Tensor:
    """Return the logits of a row that is one document, head by head."""
    state = dict(model.named_parameters())
    (tokens,) = batch["tokens"]
    x = state["embedding.weight"][tokens] + state["positions.weight"][: len(tokens)]
    for number in range(len(model.layers)):
        x = packed.plain_layer(x, state, f"layers.{number}", model.kind)
    return (x @ state["head.weight"].T)[None]


def by_document(forward: Callable[[Any, Batch], Tensor], model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of each document by itself, at its places in the rows."""
    whole = []
    for row in range(len(batch["tokens"])):
        sizes = batch["documents"][row].bincount().tolist()
        alone = [
            forward(model, {name: batch[name][row : row + 1, own] for name in ("tokens", "positions")})[0]
            for own in torch.arange(LENGTH).split(sizes)
        ]
        whole.append(torch.cat(alone))
    return torch.stack(whole)


class Odd(nn.Module):
    """A decoder's shell around operations that only DTensor has rules for: of a sharded hidden dimension, and of samples."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        each = LAYERS // self.stages
        for stage in range(self.stages):
            with piper.annotate("PP"):
                if stage == 0:
                    x = self.embedding(tokens)
                for number in range(stage * each, (stage + 1) * each):
                    hidden = self.up[number](x)
                    spread, mean = torch.std_mean(hidden, dim=1, keepdim=True)
                    hidden = F.hardswish((hidden - mean) / (spread + 1)) + F.logsigmoid(hidden)
                    x = x + self.down[number](hidden)
                if stage == self.stages - 1:
                    x = self.head(x)
        return cast(Tensor, x)


def our_loss(
    forward: Callable[[Any, Batch], Tensor], model: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(forward(model, batch), batch["labels"])


def family(
    build: Callable[[int], nn.Module],
    forward: Callable[[Any, Batch], Tensor],
    weights: Mapping[str, int],
    **more: Any,  # noqa: ANN401  the other fields of a family
) -> Family:
    return Family(build=build, forward=forward, loss=partial(our_loss, forward), weights=weights, **more)


def built(model: type[nn.Module], stages: int) -> nn.Module:
    return model()


def hidden_of(model: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, model(batch["tokens"])[0])


ATTENTION = {"*attention.q|*attention.k|*attention.v|embedding|head": 0, "*attention.out": 1}
STOCK_ATTENTION = {"*q_proj|*k_proj|*v_proj|*embed_tokens|*lm_head": 0, "*o_proj": 1}
DOCUMENTS = ("tokens", "labels", "documents", "positions", "places")
FAMILIES: Mapping[str, Family] = {
    "decoder": family(dense, tokens_of, decoder.SHARDED_WEIGHTS),
    "gpt2": family(gpt2, stock_tokens, GPT2),
    "moe": family(
        sparse,
        tokens_of,
        ATTENTION,
        instead=lambda: patch.object(moe.SparseFeedForward, "forward", each_expert),
    ),
    "qwen3moe": family(stock_experts, stock_tokens, STOCK_ATTENTION, plain=lambda: stock_experts(1, "eager")),
    "odd": family(Odd, tokens_of, {"up.?|embedding|head": 0, "down.?": 1}),
    "gpt2 prelu": family(partial(gpt2, activation="prelu"), stock_tokens, GPT2),
    **{
        kind: family(
            partial(packed.Packed, kind, layers=LAYERS),
            documents_of,
            packed.WEIGHTS,
            fields=DOCUMENTS,
            plain_forward=partial(by_document, one_document),
        )
        for kind in ("flex", "sdpa", "placed", "varlen")
    },
    "llama flex": family(
        llama,
        stock_documents,
        tensor_plan(transformers.LlamaConfig()),
        fields=("tokens", "labels", "positions"),
        plain=lambda: llama(1, "sdpa"),
        plain_forward=partial(by_document, stock_documents),
    ),
    **{
        f"{name} {loss.__name__}": Family(
            build=partial(built, model),
            loss=loss,
            forward=hidden_of,
            weights=vocabulary.WEIGHTS[model],
            plain_loss=lambda model, batch: (vocabulary.wanted(model, batch), torch.ones(())),
            stages=2,
        )
        for name, model in (("two tokens", vocabulary.TwoTokens), ("llama", vocabulary.Llama))
        for loss in (vocabulary.fused, vocabulary.unfused)
    },
}
