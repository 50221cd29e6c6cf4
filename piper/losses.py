"""Losses that mean the same however a batch is sliced: a sum, and the weight to divide it by.

A mean over the labels that count divides each slice of a batch by another number: with rows of unequal length
the mean of these means is not the mean of the batch. A job whose loss returns (sum, weight) trains on the sum
over all slices divided by the weight of all slices, which is exactly what one device trains on.

job = piper.Job(model=..., loss=piper.losses.huggingface, data=..., strategy=...)
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.errors import ConfigError

__all__ = ["cross_entropy", "huggingface"]

IGNORED = -100  # torch's default: the label of a position that has no target
NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration")  # of decoders: a position predicts the next label
SAME_POSITION = ("ForMaskedLM", "ForTokenClassification")
CLASSES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and the number of labels that count.

    logits: [..., classes]; labels: [...], whole numbers. A label equal to ignore_index does not count. The
    sum is taken in float32 or wider. Divided by the number it is `torch.nn.functional.cross_entropy`.
    """
    if logits.shape[:-1] != labels.shape:
        raise ConfigError(
            "logits and labels do not fit together",
            by="piper.losses.cross_entropy",
            facts={"logits": str(list(logits.shape)), "labels": str(list(labels.shape))},
            hint="give logits [..., classes] and labels [...]",
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = labels.flatten()
    rows = logits.reshape(-1, logits.shape[-1]).to(wide)
    total = F.cross_entropy(rows, flat, ignore_index=ignore_index, reduction="sum")
    return total, (flat != ignore_index).sum().to(total.dtype)


def huggingface(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a transformers model's own loss as (sum, weight): a Job's loss.

    The batch's fields are the model's keyword arguments, with `labels` as transformers takes them. A causal
    model predicts the label of the next position, a masked or token model that of the same position, a
    classification model one label (or value, or set of labels) per sample. Where the model adds a router's
    load-balancing loss, so does this.
    """
    if "labels" not in batch:
        raise ConfigError(
            "the batch has no labels",
            by="piper.losses.huggingface",
            facts={"fields": ", ".join(batch)},
            hint='yield batches such as {"input_ids": ..., "attention_mask": ..., "labels": ...}. A model '
            "that is trained on no labels needs a loss of its own: lambda model, batch: model(**batch).loss",
        )
    out, labels = outputs(model, batch), batch["labels"]
    kind = getattr(model, "loss_type", None) or "ForCausalLM"  # as transformers takes an unknown one
    if kind in CLASSES:
        total, weight = classification(getattr(model, "config", None), out.logits, labels)
    elif kind in SAME_POSITION or is_encoder_decoder(model):
        total, weight = cross_entropy(out.logits, labels)
    elif kind in NEXT_TOKEN:
        # The labels are moved, not the logits: a part of the logits would be a second copy of them.
        total, weight = cross_entropy(out.logits, F.pad(labels[..., 1:], (0, 1), value=IGNORED))
    else:
        raise ConfigError(
            f"there is no (sum, weight) form of the loss of {type(model).__name__}",
            by="piper.losses.huggingface",
            facts={"loss type": str(kind)},
            hint="write the job's loss: return the sum over the samples, and the number to divide it by",
        )
    balance = getattr(out, "aux_loss", None)
    if isinstance(balance, Tensor):
        share: Any = model.router_aux_loss_coef
        total = total + share * balance.to(total.dtype) * weight
    return total, weight


def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Run a transformers model without its own loss, and without a cache of keys and values."""
    given: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
    if is_encoder_decoder(model):
        if "decoder_input_ids" not in given:  # which the model makes of its labels
            given["labels"] = batch["labels"]
        given["use_cache"] = False
    elif (getattr(model, "loss_type", None) or NEXT_TOKEN[0]) in NEXT_TOKEN:
        given["use_cache"] = False
    return model(**given)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a transformers model has an encoder and a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def classification(config: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return the loss of a classification model: of one class, of several, or of a value."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    kind = getattr(config, "problem_type", None)
    if kind is None:
        whole = not labels.is_floating_point()
        several = "single_label_classification" if whole else "multi_label_classification"
        kind = "regression" if logits.shape[-1] == 1 else several
    if kind == "single_label_classification":
        return cross_entropy(logits, labels.reshape(logits.shape[:-1]))
    values, wanted = logits.to(wide), labels.reshape(logits.shape).to(wide)
    if kind == "regression":
        total = F.mse_loss(values, wanted, reduction="sum")
    else:
        total = F.binary_cross_entropy_with_logits(values, wanted, reduction="sum")
    return total, torch.full_like(total, wanted.numel())
