"""Stock models that assign to parts of values, which latent attention and routers do, against plain PyTorch."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import piper
from piper import at, shard
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import plain

transformers = pytest.importorskip("transformers", reason="needs transformers")
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GROUPS = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
LLAMA4 = {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1}
MODELS: Mapping[str, tuple[str, str, Mapping[str, int]]] = {
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, **ROUTED, **GROUPS}),
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**LATENT, **ROUTED, **GROUPS, **INDEXED},
    ),
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
}
FIELDS = {"input_ids": 1, "labels": 1}
STRATEGIES: Mapping[str, Callable[[nn.Module], list[piper.Directive]]] = {
    "TP": lambda model: piper.strategies.tensor(1, 2, weights=piper.tensor_plan(model), sequence=False),
    "TP and SP": lambda model: piper.strategies.tensor(1, 2, weights=piper.tensor_plan(model)),
    "CP": lambda model: [shard(at(), [0, 1], axis="CP", batch=FIELDS)],
}


class Wide(TorchFunctionMode):
    """Computes in fp64 what a model computes in fp32, as a job in fp64 does under `shard`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def build(name: str, experts: str = "grouped_mm") -> nn.Module:
    kind, config, sizes = MODELS[name]
    made = getattr(transformers, config)(**SIZES, **sizes)
    if name != "Llama 4":
        made._experts_implementation = experts
    model: nn.Module = getattr(transformers, kind)(made)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batches() -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(5)
    texts = (torch.randint(3, 32, (4, 8), generator=draws) for _ in range(3))
    return [{"input_ids": text, "labels": text.clone()} for text in texts]


def plain_loss(model: nn.Module, batch: plain.Batch) -> Tensor:
    with Wide():
        loss: Tensor = model(**batch, use_cache=False).loss
    return loss


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_in_plain_pytorch(name: str, strategy: str) -> None:
    with torch.device("meta"):
        directives = STRATEGIES[strategy](build(name))
    job = piper.Job(
        model=lambda: build(name),
        loss=piper.losses.huggingface,
        data=batches,
        strategy=directives,
        optimizer=plain.sgd,
        precision="fp64",
    )
    wanted = plain.train(lambda: build(name, "eager"), plain_loss, batches())
    with launch_inline(piper.compile(job, device="cpu"), Options(keep_gradients=True)) as run:
        first, *rest = batches()
        losses = [run.step(first).loss]
        assert plain.largest_difference(wanted.gradients, run.gradients()) < 1e-9
        losses += [run.step(batch).loss for batch in rest]
        assert plain.largest_difference(wanted.state, run.state_dict()) < 1e-9
    assert losses == pytest.approx(wanted.losses, rel=1e-9)
