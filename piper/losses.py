"""Losses that mean the same however a batch is sliced: a sum, and the weight to divide it by.

A mean over the labels that count divides each slice of a batch by another number: with rows of unequal length
the mean of these means is not the mean of the batch. A job whose loss returns (sum, weight) trains on the sum
over all slices divided by the weight of all slices, which is exactly what one device trains on.

job = piper.Job(model=..., loss=piper.losses.huggingface, data=..., strategy=...)
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper.capture.shard.head_operators  # noqa: F401  registers the operators
from piper.errors import ConfigError

__all__ = ["cross_entropy", "fused_cross_entropy", "huggingface"]

IGNORED = -100  # torch's default: the label of a position that has no target
NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration")  # of decoders: a position predicts the next label
SAME_POSITION = ("ForMaskedLM", "ForTokenClassification")
CLASSES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = IGNORED,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and the number of labels that count.

    logits: [..., classes]; labels: [...], whole numbers. A label equal to ignore_index does not count. The
    sum is taken in float32 or wider. Divided by the number it is `torch.nn.functional.cross_entropy`.
    weight: of each class; a label counts as much as its class weighs, and so much is the number. z_loss: a
    factor. The square of the log-sum-exp of a row's logits, times this, is added for each label that counts.
    """
    fits = logits.shape[:-1] == labels.shape
    hint = "give logits [..., classes] and labels [...]"
    _check_shapes(fits, "cross_entropy", hint, logits=logits, labels=labels)
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = labels.flatten()
    rows = logits.reshape(-1, logits.shape[-1]).to(wide)
    scales = weight.to(wide) if weight is not None else None
    total = F.cross_entropy(
        rows, flat, scales, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    counted = flat != ignore_index
    if scales is None and not z_loss:
        return total, counted.sum().to(total.dtype)
    counts = _counts(flat, counted, scales, wide)
    if z_loss:
        total = total + z_loss * (rows.logsumexp(-1).square() * counts).sum()
    return total, counts.sum()


def fused_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    pieces: int = 8,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` of the logits `hidden @ weight.T + bias`, which are never all in memory.

    hidden: [..., width]; weight, of the head: [classes, width]; labels: [...]. The logits are computed in
    `pieces` of the classes, and once more in the backward; one piece is alive at a time. class_weight is
    `weight` there. A label that is neither a class nor ignore_index gives nan.
    """
    fits = hidden.shape[:-1] == labels.shape and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
    hint = "give hidden [..., width], labels [...], the weight [classes, width] and at least one piece"
    given = {"hidden": hidden, "labels": labels, "weight": weight}
    _check_shapes(fits and pieces >= 1, "fused_cross_entropy", hint, **given)
    kind, device = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    classes, flat = weight.shape[0], labels.flatten()
    rows, weight = _cast(hidden.reshape(-1, hidden.shape[-1]), kind), _cast(weight, kind)
    bias = _cast(bias, kind) if bias is not None else None
    wide = torch.promote_types(kind, torch.float32)
    scales = class_weight.to(wide) if class_weight is not None else None
    if label_smoothing and scales is None:
        scales = rows.new_ones(classes, dtype=wide)
    spread_by = scales if label_smoothing else None
    total, picked, spread = torch.ops.piper.head_sums(rows, weight, bias, flat, spread_by, pieces)
    counted = flat != ignore_index
    counts = _counts(flat, counted, scales if class_weight is not None else None, wide)
    wrong = counted & ((flat < 0) | (flat >= classes))
    losses = (total - picked.masked_fill(wrong, torch.nan)) * counts
    if label_smoothing and scales is not None:
        smooth = (total * scales.sum() - spread) * counted / classes
        losses = losses * (1 - label_smoothing) + smooth * label_smoothing
    if z_loss:
        losses = losses + z_loss * total.square() * counts
    return losses.sum(), counts.sum()


def _counts(labels: Tensor, counted: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return how much each label counts: 0 where it is ignored, else 1 or the weight of its class."""
    if scales is None:
        return counted.to(dtype)
    return torch.where(counted, scales[torch.where(counted, labels, 0)], 0.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type. One that has it is not cast: tensor parallelism looks for parameters."""
    return x if x.dtype is dtype else x.to(dtype)


def _check_shapes(fits: bool, by: str, hint: str, **given: Tensor) -> None:
    if not fits:
        facts = {name: str(list(x.shape)) for name, x in given.items()}
        raise ConfigError("these shapes do not fit together", by=f"piper.losses.{by}", facts=facts, hint=hint)


def huggingface(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a transformers model's own loss as (sum, weight): a Job's loss.

    The batch's fields are the model's keyword arguments, with `labels` as transformers takes them. A causal
    model predicts the label of the next position, a masked or token model that of the same position, a
    classification model one label (or value, or set of labels) per sample. Where the model adds a router's
    load-balancing loss, or leaves out the labels of positions that attention_mask masks, so does this.
    """
    if "labels" not in batch:
        raise ConfigError(
            "the batch has no labels",
            by="piper.losses.huggingface",
            facts={"fields": ", ".join(batch)},
            hint='yield batches such as {"input_ids": ..., "attention_mask": ..., "labels": ...}. A model '
            "that is trained on no labels needs a loss of its own: lambda model, batch: model(**batch).loss",
        )
    others = [name for name in batch if "label" in name and name != "labels"]
    kind = getattr(model, "loss_type", None)
    place = "same"
    adapted: Any = getattr(model, "get_base_model", lambda: model)  # by peft
    if kind not in (*CLASSES, *SAME_POSITION):
        place = predicted(type(adapted()), kind, is_encoder_decoder(model))
    if others or not place:
        raise ConfigError(
            f"there is no (sum, weight) form of the loss of {type(model).__name__}",
            by="piper.losses.huggingface",
            facts={"loss type": str(kind)} | ({"more labels": ", ".join(others)} if others else {}),
            hint="write the job's loss: return the sum over the samples, and the number to divide it by",
        )
    out, labels = outputs(model, batch), batch["labels"]
    if "attention_mask" in batch and leaves_out_masked(type(adapted())):
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
    if kind in CLASSES:
        total, weight = classification(getattr(model, "config", None), out.logits, labels)
    elif place == "same":
        total, weight = cross_entropy(out.logits, labels)
    else:
        # The labels are moved, not the logits: a part of the logits would be a second copy of them.
        total, weight = cross_entropy(out.logits, F.pad(labels[..., 1:], (0, 1), value=IGNORED))
    balance = getattr(out, "aux_loss", None)
    if isinstance(balance, Tensor):
        share: Any = model.router_aux_loss_coef
        total = total + share * balance.to(total.dtype) * weight
    return total, weight


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def predicted(model: type[nn.Module], kind: str | None, encoder_decoder: bool) -> str:
    """Return whether a position predicts its own label ("same"), the "next" one, or what nothing tells ("").

    kind: the type of loss that transformers takes for the class. Older classes compute their loss in the
    forward instead, whose code tells which.
    """
    usual = "same" if encoder_decoder else "next"
    if kind not in (None, *NEXT_TOKEN):
        return ""
    if not model.__module__.startswith("transformers.models.") or (kind == NEXT_TOKEN[1] and usual == "next"):
        return usual
    code = inspect.unwrap(model.forward).__code__
    if "loss_function" in code.co_names or {"shift_logits", "shift_labels"} & {*code.co_varnames}:
        return usual
    # The decoder of an encoder-decoder, alone: its labels are moved before.
    alone = "CrossEntropyLoss" in code.co_names and (encoder_decoder or kind == NEXT_TOKEN[0])
    return "same" if alone else ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def leaves_out_masked(model: type[nn.Module]) -> bool:
    """Return whether a class of transformers leaves masked positions out of the loss in its forward."""
    names = inspect.unwrap(model.forward).__code__.co_varnames
    stock = model.__module__.startswith("transformers.models.")
    return stock and bool({"active_loss", "shift_attention_mask"} & {*names})


def outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """Run a transformers model without its own loss, and without a cache of keys and values."""
    given: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
    next_token = (getattr(model, "loss_type", None) or NEXT_TOKEN[0]) in NEXT_TOKEN
    # Labels: what an encoder-decoder makes its decoder's tokens of, and why one that classifies has no cache.
    if is_encoder_decoder(model) and not (next_token and "decoder_input_ids" in given):
        given["labels"] = batch["labels"]
    if next_token:
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
