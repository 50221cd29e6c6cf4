"""Random models: what a seed draws, and the module it stands for, with marks or in plain PyTorch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

Kind = Literal["mlp", "attention", "experts", "gated"]
LENGTH, CLASSES = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model: residual blocks in stages, over vectors or over sequences of tokens."""

    dim: int
    blocks: tuple[Kind, ...]
    stages: tuple[int, ...]  # the stage of each block, rising
    tokens: bool
    experts: int
    top_k: int
    layers: bool  # each block is a region LAYER inside its stage
    skip: bool  # the first stage's output is added in the last stage
    tied_head: bool  # the head is the embedding
    tied_blocks: bool  # the first and the last MLP share a weight
    frozen: tuple[str, ...]  # prefixes of parameters that do not train
    head_inside: bool  # the head is in the last stage, not outside every region
    loss: Literal["mean", "weighted"]

    @property
    def count(self) -> int:
        """The number of stages."""
        return self.stages[-1] + 1


def draw_spec(rng: Random) -> Spec:
    """Draw a model."""
    tokens = rng.random() < 0.5
    kinds: list[Kind] = ["mlp", "mlp", "gated", "experts", *(["attention"] if tokens else [])]  # type: ignore[list-item]
    stages = rng.choice([1, 2, 2, 2, 3, 4, 4])
    per = [rng.choice([1, 1, 2]) for _ in range(stages)]
    blocks = tuple(rng.choice(kinds) for _ in range(sum(per)))
    place = tuple(stage for stage, count in enumerate(per) for _ in range(count))
    experts = rng.choice([2, 4])
    frozen = [f"blocks.{i}." for i in range(len(blocks)) if rng.random() < 0.12]
    if tokens and rng.random() < 0.15:
        frozen.append("embedding")
    mlps = [i for i, kind in enumerate(blocks) if kind == "mlp"]
    return Spec(
        dim=rng.choice([4, 8]),
        blocks=blocks,
        stages=place,
        tokens=tokens,
        experts=experts,
        top_k=rng.choice([1, 2]),
        layers=rng.random() < 0.3,
        skip=stages > 2 and rng.random() < 0.3,
        tied_head=tokens and rng.random() < 0.4,
        tied_blocks=len(mlps) > 1 and rng.random() < 0.4,
        frozen=tuple(frozen) if len(frozen) <= len(blocks) // 2 else (),
        head_inside=rng.random() < 0.5,
        loss=rng.choice(["mean", "weighted", "weighted"]),
    )


class MLP(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Gated(nn.Module):
    """A residual block with a gate and a scale that broadcasts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * F.silu(self.gate(x)) * self.value(x)
        return result


class Attention(nn.Module):
    """Causal self-attention with two heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.RMSNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Experts(nn.Module):
    """A mixture of experts: by `route` and `unroute`, or in plain PyTorch expert by expert."""

    def __init__(self, dim: int, experts: int, top_k: int, plain: bool) -> None:
        super().__init__()
        self.plain, self.count, self.top_k = plain, experts, top_k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, dim=-1)
        mixed = self._plain(flat, chosen) if self.plain else self._routed(flat, chosen)
        result: Tensor = x + (mixed * weights[..., None]).sum(1).view_as(x)
        return result

    def _plain(self, flat: Tensor, chosen: Tensor) -> Tensor:
        """[n, d] and [n, k] -> [n, k, d], each row through its expert's own matrices."""
        hidden = torch.tanh(torch.einsum("nd,nkdf->nkf", flat, self.up[chosen]))
        return torch.einsum("nkf,nkfd->nkd", hidden, self.down[chosen])

    def _routed(self, flat: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        grouped = flat[order // self.top_k]
        with piper.annotate("EP"):
            rows, received = piper.route(grouped, counts)
            hidden = torch.tanh(piper.grouped_mm(rows, self.up, received))
            y = piper.grouped_mm(hidden, self.down, received)
            back = piper.unroute(y, received, grouped.shape[0])
        mixed: Tensor = torch.zeros_like(back).index_copy(0, order, back)
        return mixed.view(-1, self.top_k, mixed.shape[-1])


class Model(nn.Module):
    """The model of a spec. plain: nothing of Piper is called."""

    def __init__(self, spec: Spec, plain: bool) -> None:
        super().__init__()
        self.spec, self.plain = spec, plain
        if spec.tokens:
            self.embedding = nn.Embedding(CLASSES, spec.dim)
        self.blocks = nn.ModuleList(self._block(kind) for kind in spec.blocks)
        self.head = nn.Linear(spec.dim, CLASSES, bias=False)
        if spec.tied_head:
            self.head.weight = self.embedding.weight
        mlps = [block for block in self.blocks if isinstance(block, MLP)]
        if spec.tied_blocks:
            mlps[-1].up.weight = mlps[0].up.weight
        for name, parameter in self.named_parameters():
            if name.startswith(spec.frozen or ("no such",)):
                parameter.requires_grad_(False)

    def _block(self, kind: Kind) -> nn.Module:
        spec = self.spec
        match kind:
            case "mlp":
                return MLP(spec.dim)
            case "gated":
                return Gated(spec.dim)
            case "attention":
                return Attention(spec.dim)
            case "experts":
                return Experts(spec.dim, spec.experts, spec.top_k, self.plain)

    def _region(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext() if self.plain else piper.annotate(tag)

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        kept = x
        for stage in range(spec.count):
            with self._region("PP"):
                if stage == 0 and spec.tokens:
                    x = self.embedding(x)
                for block, where in zip(self.blocks, spec.stages, strict=True):
                    if where == stage:
                        with self._region("LAYER") if spec.layers else nullcontext():
                            x = block(x)
                if stage == 0:
                    kept = x
                if stage == spec.count - 1:
                    x = x + kept if spec.skip else x
                    x = self.head(x) if spec.head_inside else x
        return x if spec.head_inside else self.head(x)


def draw_batch(spec: Spec, rows: int, seed: int) -> dict[str, Tensor]:
    """Draw a batch; with a weighted loss some labels or samples do not count."""
    rng = torch.Generator().manual_seed(seed)
    shape = (rows, LENGTH) if spec.tokens else (rows,)
    x = (
        torch.randint(CLASSES, shape, generator=rng)
        if spec.tokens
        else torch.randn(rows, spec.dim, generator=rng, dtype=torch.float64)
    )
    batch = {"x": x, "y": torch.randint(CLASSES, shape, generator=rng)}
    if spec.loss == "weighted":
        batch["weight"] = torch.randint(0, 4, shape, generator=rng).double()
        batch["weight"][0] = 1.0  # something counts
    return batch


def loss_of(spec: Spec, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    """Return the loss: a mean over samples, or a sum and its weight."""
    logits = model(batch["x"])
    each = F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(), reduction="none")
    if spec.loss == "mean":
        return each.mean()
    weights = batch["weight"].flatten()
    return (each * weights).sum(), weights.sum()
