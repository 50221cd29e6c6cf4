"""Finds the weights of a Hugging Face model to shard for tensor parallelism, from the plan it ships."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from piper.errors import ConfigError

OUTPUTS, INPUTS = 0, 1  # dimensions of a linear layer's weight
STYLES: Mapping[
    str, int | None
] = {  # what transformers calls it: the dimension; None: every device holds all of it
    "colwise": OUTPUTS,
    "colwise_rep": OUTPUTS,
    "colwise_gather_output": OUTPUTS,
    "packed_colwise": OUTPUTS,
    "rowwise": INPUTS,
    "rowwise_rep": INPUTS,
    "rowwise_split_input": INPUTS,
    "packed_rowwise": INPUTS,
    "embedding_rowwise": 0,
    "replicated_with_grad_allreduce": None,
    "sequence_parallel": None,
    "mla_kv_a_proj": None,
}
VOCABULARY = {"*embed_tokens": 0, "*lm_head": 0}  # a table and a head by rows: no device holds all logits


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
