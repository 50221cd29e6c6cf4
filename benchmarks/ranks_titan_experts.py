"""TorchTitan's mixtures of experts as the models of the other sides: Qwen3 and DeepSeek-V3, at equal sizes.

Their routers choose and weigh experts as ours do, and the bias that balances experts is off on both sides.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper.models import moe
from tests import deepseek

NAMES = {
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.out": "attention.wo",
    "attention.q_down": "attention.wq_a",
    "attention.q_up": "attention.wq_b",
    "attention.kv_down": "attention.wkv_a",
    "attention.kv_up": "attention.wkv_b",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
    "ffn.router": "moe.router.gate",
    "ffn.shared.gate": "moe.shared_experts.w1",
    "ffn.shared.up": "moe.shared_experts.w3",
    "ffn.shared.down": "moe.shared_experts.w2",
}
KERNELS = "torchtitan.models.moe.kernels"
WHOLE = {"embedding": "tok_embeddings", "head": "output"}


def qwen3(config: moe.Config, *, on_gpu: bool) -> tuple[Any, Any]:
    """Return TorchTitan's Qwen3 and the arguments of a mixture of experts."""
    from torchtitan.models import qwen3
    from torchtitan.models.moe import MoEArgs

    args = qwen3.Qwen3ModelArgs(
        dim=config.dim,
        n_layers=config.layers,
        n_heads=config.heads,
        n_kv_heads=config.kv_heads,
        vocab_size=config.vocab,
        head_dim=config.head_dim,
        norm_eps=config.eps,
        rope_theta=config.rope_base,
        moe_enabled=True,
        moe_inter_dim=config.hidden,
        moe_args=MoEArgs(
            num_experts=config.experts,
            num_shared_experts=0,
            top_k=config.top_k,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=None,
            use_grouped_mm=on_gpu,
        ),
    )
    return qwen3, args


def deepseek_v3(config: deepseek.Config, *, on_gpu: bool) -> tuple[Any, Any]:
    """Return TorchTitan's DeepSeek-V3 and its arguments."""
    from torchtitan.models import deepseek_v3
    from torchtitan.models.moe import MoEArgs

    assert not config.balance, "TorchTitan moves its bias by another rule"
    args = deepseek_v3.DeepSeekV3ModelArgs(
        dim=config.dim,
        inter_dim=config.dense_hidden,
        moe_inter_dim=config.hidden,
        n_layers=config.layers,
        n_dense_layers=config.dense_layers,
        n_heads=config.heads,
        vocab_size=config.vocab,
        norm_eps=config.eps,
        rope_theta=config.rope_base,
        q_lora_rank=config.q_rank,
        kv_lora_rank=config.kv_rank,
        qk_nope_head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.head_dim,
        moe_args=MoEArgs(
            num_experts=config.experts,
            num_shared_experts=config.shared,
            top_k=config.top_k,
            score_func="sigmoid",
            route_norm=True,
            route_scale=config.scale,
            score_before_experts=False,
            load_balance_coeff=None,
            use_grouped_mm=on_gpu,
        ),
    )
    return deepseek_v3, args


def as_titan_experts(state: Mapping[str, Tensor], config: moe.Config | deepseek.Config) -> dict[str, Tensor]:
    """Return the weights of a mixture of experts under TorchTitan's names."""
    return {
        titan: tensor for name, value in state.items() for titan, tensor in named_weights(name, value, config)
    }


def named_weights(
    name: str, value: Tensor, config: moe.Config | deepseek.Config
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight under TorchTitan's names: gates and values apart, inputs of experts last."""
    module, _, kind = name.rpartition(".")
    layer, _, inner = module.removeprefix("layers.").partition(".")
    if kind == "gate_up":
        for part, weight in zip(("w1", "w3"), value.transpose(1, 2).chunk(2, dim=1), strict=True):
            yield f"layers.{layer}.moe.experts.{part}", weight
    elif kind == "down":
        yield f"layers.{layer}.moe.experts.w2", value.transpose(1, 2)
    elif inner and kind == "weight":
        if isinstance(config, deepseek.Config) and inner in ("attention.q_up", "attention.kv_down"):
            value = with_neighbours(value, config, heads=config.heads if inner.endswith("q_up") else 1)
        yield f"layers.{layer}.{NAMES.get(inner, inner)}.weight", value
    elif kind == "weight":
        yield f"{WHOLE.get(module, module)}.weight", value
    # What is left is the bias of a router, which stays zero.


def with_neighbours(weight: Tensor, config: deepseek.Config, heads: int) -> Tensor:
    """Return a weight whose last features of a head are turned in pairs (2i, 2i + 1), not (i, i + half)."""
    by_head = weight.unflatten(0, (heads, -1))
    plain, turned = by_head[:, : -config.rope_dim], by_head[:, -config.rope_dim :]
    pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([plain, pairs], dim=1).flatten(0, 1)


def let_experts_run_on_the_host() -> None:
    """Let TorchTitan's experts run without a GPU: its own reference orders the rows, no kernel does."""
    if importlib.util.find_spec("triton") is None:
        load_kernels_without_triton()
    kernels = importlib.import_module(KERNELS)
    ordered = functools.partial(kernels.generate_permute_indices, use_cpu=True)
    vars(importlib.import_module("torchtitan.models.moe.utils"))["generate_permute_indices"] = ordered
    plain = torch.histc

    def counted(values: Tensor, bins: int, min: float, max: float) -> Tensor:
        if values.is_floating_point():
            return plain(values, bins, min, max)
        return values.bincount(minlength=bins)  # torch counts no integers on the host

    torch.histc = counted  # type: ignore[assignment]


def load_kernels_without_triton() -> None:
    """Import TorchTitan's kernels of experts, which are not called, before it does so itself."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    vars(language)["constexpr"] = object
    vars(triton).update(jit=lambda kernel: kernel, language=language)
    found = importlib.util.find_spec("torchtitan")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / "models" / "moe" / "kernels.py"
    spec = importlib.util.spec_from_file_location(KERNELS, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        spec.loader.exec_module(module)
    finally:  # others ask if Triton is there
        del sys.modules["triton"], sys.modules["triton.language"]
    sys.modules[KERNELS] = module
