"""Hugging Face models as they are: their losses, experts as marker operations, plans of tensor parallelism.

register_experts()
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(..., experts_implementation="piper"))
annotate_modules(model, {"PP": [...], "EP": ["model.layers.*.mlp.experts"]})
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import ConfigError
from piper.experts import grouped_mm, route, unroute
from piper.losses import cross_entropy
from piper.models.causal import Batch
from piper.models.layers import collect, group_by_expert

NAME = "piper"  # experts_implementation=NAME
OUTPUTS, INPUTS = 0, 1  # dimensions of a linear layer's weight
STYLES: Mapping[str, int | None] = {  # what transformers calls it: the dimension
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), OUTPUTS),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), INPUTS),
    "embedding_rowwise": 0,
    # Every device holds all of it
    **dict.fromkeys(("replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj"), None),
}
VOCABULARY = {"*embed_tokens": 0, "*lm_head": 0}  # a table and a head by rows: no device holds all logits


def register_experts() -> None:
    """Let transformers run the experts of a model through `route`, `grouped_mm` and `unroute`.

    A model does so when its config says `experts_implementation="piper"`. Registering twice changes nothing.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ConfigError(
            "transformers has no registry of experts",
            by="register_experts",
            facts={"cause": str(error)},
            hint="install transformers 5 or later: pip install 'transformers>=5'",
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(experts: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # noqa: ANN401
    """Send each token through the experts chosen for it; called by transformers with its own experts module.

    tokens: [n, d]; chosen and weights: [n, k].
    """
    order, counts = group_by_expert(chosen, experts.num_experts)
    grouped = tokens[order // chosen.shape[-1]]
    rows, received = route(grouped, counts)

    def linear(x: Tensor, name: str) -> Tensor:
        stored_out_in = not experts.is_transposed  # transformers' usual layout is [experts, out, in]
        y = grouped_mm(x, getattr(experts, name), received, transpose=stored_out_in)
        if not experts.has_bias:
            return y
        expert_of_row = torch.repeat_interleave(received, output_size=x.shape[0])
        biases: Tensor = getattr(experts, f"{name}_bias")
        return y + biases[expert_of_row]

    hidden = linear(rows, "gate_up_proj" if experts.has_gate else "up_proj")
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    y = linear(hidden, "down_proj")
    return collect(unroute(y, received, grouped.shape[0]), weights, order).to(tokens.dtype)


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and how many labels it counts: exact however a batch is sliced.

    The labels are those of the positions. For batches as transformers takes them, see `piper.losses`.
    """
    logits: Tensor = model(input_ids=batch["tokens"], use_cache=False).logits
    return cross_entropy(logits, batch["labels"])


def tensor_plan(model_or_config: Any) -> dict[str, int]:  # noqa: ANN401 (transformers' classes)
    """Return `weights` for `shard(..., axis="TP")` from a model's or a config's `base_model_tp_plan`.

    The embedding and the head are sharded by vocabulary. Experts are left to `shard` without an axis. The
    plan of a mixture of experts may name dense layers too: of a model, what it does not have is left out.
    """
    config = getattr(model_or_config, "config", model_or_config)
    plan = getattr(config, "base_model_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"{type(config).__name__} ships no plan for tensor parallelism",
            by="tensor_plan",
            hint='write the weights yourself: {"*.q_proj|*.k_proj|*.v_proj": 0, "*.o_proj": 1, ...}',
        )
    weights: dict[str, int] = {}
    # An output that is gathered is worth sharding where a layer beside it takes it apart again.
    taken = {pattern.rpartition(".")[0] for pattern, style in plan.items() if STYLES.get(style) == INPUTS}
    for pattern, style in plan.items():
        if ".experts" in pattern:
            continue
        if style not in STYLES:
            raise ConfigError(
                f"{style!r} is not a way to shard a weight that is known here",
                by="tensor_plan",
                facts={"module": pattern, "known": ", ".join(STYLES)},
                hint="copy the plan and say by hand which dimension of this weight is sharded",
            )
        dim = STYLES[style]
        gathered = style == "colwise_gather_output" and pattern.rpartition(".")[0] not in taken
        if dim is not None and not gathered:
            weights[f"*{pattern}"] = dim
    weights |= VOCABULARY
    if not isinstance(model_or_config, nn.Module):
        return weights
    modules = [name for name, _ in model_or_config.named_modules()]
    return {one: dim for one, dim in weights.items() if any(fnmatchcase(name, one) for name in modules)}
