"""Hugging Face models as they are: their losses, and their experts through the marker operations.

register_experts()
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(..., experts_implementation="piper"))
annotate_modules(model, {"PP": [...], "EP": ["model.layers.*.mlp.experts"]})
"""

from typing import Any

import torch
from torch import Tensor, nn

from piper.errors import ConfigError
from piper.experts import grouped_mm, route, unroute
from piper.losses import cross_entropy
from piper.models.causal import Batch, mean_cross_entropy
from piper.models.layers import collect, group_by_expert

NAME = "piper"  # experts_implementation=NAME


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


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of `batch["labels"]` given `batch["tokens"]`; label -100 does not count.

    It is exact if every row has equally many labels that count; `token_loss` is always exact.
    """
    return mean_cross_entropy(_logits(model, batch), batch["labels"])


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and how many labels it counts: exact however a batch is sliced.

    The labels are those of the positions. For batches as transformers takes them, see `piper.losses`.
    """
    return cross_entropy(_logits(model, batch), batch["labels"])


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["tokens"], use_cache=False).logits
    return logits
