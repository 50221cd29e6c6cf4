"""The losses of `piper.losses` are those of torch and transformers, as a sum and its weight."""

import io
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import piper
from piper.check.check import check
from piper.cli.plan import print_plan
from piper.compiler import compile
from piper.errors import CaptureError, ConfigError
from piper.recipe import load_recipe
from piper.run.launch import launch_inline
from piper.train.train_command import train_recipe
from piper.train.train_options import TrainOptions

ROWS, LENGTH, VOCAB = 4, 6, 11
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def test_cross_entropy_is_torch_s_as_a_sum_and_a_number() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, VOCAB, generator=rng)
    labels = torch.randint(VOCAB, (3, 4), generator=rng)
    labels[0, 1:], labels[2, 0] = -100, 7
    total, weight = piper.losses.cross_entropy(logits, labels)
    assert weight.item() == 9.0
    torch.testing.assert_close(total / weight, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    kept = labels.masked_fill(labels == -100, 0)
    total, weight = piper.losses.cross_entropy(logits, kept, ignore_index=7)
    assert weight.item() == (kept != 7).sum().item()
    wanted = F.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=7)
    torch.testing.assert_close(total / weight, wanted)


def test_cross_entropy_sums_in_float32_at_least() -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    for given, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        total, weight = piper.losses.cross_entropy(torch.zeros(2, 3, dtype=given), labels)
        assert (total.dtype, weight.dtype) == (wanted, wanted)


def test_logits_and_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        piper.losses.cross_entropy(torch.zeros(2, 5, 3), torch.zeros(2, 4, dtype=torch.int64))
    assert str(error.value) == (
        "piper.losses.cross_entropy: these shapes do not fit together\n"
        "  logits: [2, 5, 3]\n"
        "  labels: [2, 4]\n"
        "  hint:   give logits [..., classes] and labels [...]"
    )


class Operands(NamedTuple):
    """A head and what it is given: hidden rows, weight, bias, labels, weights of classes."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    scales: Tensor

    @staticmethod
    def drawn(dtype: torch.dtype) -> "Operands":
        rng = torch.Generator().manual_seed(0)
        hidden, weight, bias = (
            torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in ((3, 4, 6), (VOCAB, 6), (VOCAB,))
        )
        labels = torch.randint(VOCAB, (3, 4), generator=rng)
        labels[0, 1:] = -100
        return Operands(hidden, weight, bias, labels, torch.rand(VOCAB, generator=rng) + 0.1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "ignore_index": 3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_fused_loss_and_its_gradients_are_those_of_all_logits(
    name: str, weighted: bool, dtype: torch.dtype
) -> None:
    given, how = Operands.drawn(dtype), OPTIONS[name]
    hidden, weight, bias, labels, scales = given
    labels = labels.masked_fill(labels < 0, 3) if "ignore_index" in how else labels
    chosen = scales if weighted else None
    total, count = piper.losses.fused_cross_entropy(
        hidden, weight, labels, 4, bias=bias, class_weight=chosen, **how
    )
    got = [total.detach(), count, *torch.autograd.grad(total / count, given[:3])]
    logits = F.linear(hidden, weight, bias).flatten(0, 1).to(total.dtype)
    flat, ignored = labels.flatten(), how.get("ignore_index", -100)
    options = {"ignore_index": ignored, "label_smoothing": how.get("label_smoothing", 0.0)}
    entropy = F.cross_entropy(
        logits, flat, None if chosen is None else chosen.to(total.dtype), reduction="sum", **options
    )
    counts = torch.where(flat == ignored, 0.0, scales[flat.clamp(min=0)] if weighted else 1.0).to(total.dtype)
    right = entropy + how.get("z_loss", 0.0) * (logits.logsumexp(-1).square() * counts).sum()
    wanted = [right.detach(), counts.sum(), *torch.autograd.grad(right / counts.sum(), given[:3])]
    limits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=limits[dtype], atol=limits[dtype])
    both = piper.losses.cross_entropy(F.linear(hidden, weight, bias), labels, weight=chosen, **how)
    torch.testing.assert_close(both, (right, counts.sum()), rtol=limits[dtype], atol=limits[dtype])


def test_a_fused_loss_of_a_frozen_head_computes_one_gradient() -> None:
    hidden, weight, _, labels, _ = Operands.drawn(torch.float64)
    total, _ = piper.losses.fused_cross_entropy(hidden, weight.detach(), labels)
    with FlopCounterMode(display=False) as counter:
        total.backward()
    assert counter.get_total_flops() == 2 * 2 * 12 * VOCAB * 6
    logits = F.linear(hidden, weight.detach()).flatten(0, 1)
    right = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(right, hidden)[0])


def test_a_fused_loss_has_no_number_for_a_label_that_is_no_class() -> None:
    hidden, weight, _, labels, _ = Operands.drawn(torch.float64)
    labels[1, 1] = VOCAB
    assert piper.losses.fused_cross_entropy(hidden, weight, labels)[0].isnan()


def test_a_fused_loss_holds_one_piece_of_the_logits() -> None:
    rows, width, classes, pieces = 256, 16, 4096, 8
    hidden, weight = torch.randn(rows, width).requires_grad_(), torch.randn(classes, width).requires_grad_()
    labels = torch.randint(classes, (rows,))

    def peak(loss: Callable[[], tuple[Tensor, Tensor]]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
            loss()[0].backward()
        results: Any = made.profiler
        events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
        changes: list[int] = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
        hidden.grad = weight.grad = None
        return max(accumulate(changes))

    plain = peak(lambda: piper.losses.cross_entropy(F.linear(hidden, weight), labels))
    fused = peak(lambda: piper.losses.fused_cross_entropy(hidden, weight, labels, pieces))
    logits, gradients = 4 * rows * classes, 4 * width * (rows + classes)
    assert plain > 2 * logits
    assert fused < logits / pieces * 1.1 + gradients * 1.1
    assert fused > logits / pieces


def test_operands_of_a_fused_loss_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, labels, _ = Operands.drawn(torch.float64)
    what = "these shapes do not fit together"
    with pytest.raises(ConfigError, match=what):
        piper.losses.fused_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(ConfigError, match="at least one piece"):
        piper.losses.fused_cross_entropy(hidden, weight, labels, 0)
    with pytest.raises(ConfigError, match=what):
        piper.losses.fused_cross_entropy(hidden, weight, labels[:1])


def padded(seed: int = 0) -> dict[str, Tensor]:
    """Rows of 1, 3, 4 and 6 tokens; what is padded has no label."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=rng)
    mask = (torch.arange(LENGTH) < torch.tensor([[2], [3], [4], [6]])).long()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))
    return model


def bert(name: str, **config: object) -> nn.Module:
    import transformers

    sizes = transformers.BertConfig(
        **SIZES, **config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model: nn.Module = getattr(transformers, name)(sizes)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=8, n_layer=1, n_head=2, **drops)
    model: nn.Module = GPT2LMHeadModel(sizes)
    return model


def mixture() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes = Qwen3MoeConfig(
        **SIZES, **experts, num_key_value_heads=1, output_router_logits=True, router_aux_loss_coef=0.5
    )
    model: nn.Module = Qwen3MoeForCausalLM(sizes)
    return model


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    config = T5Config(vocab_size=VOCAB, **sizes, decoder_start_token_id=0, pad_token_id=0)
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def t5gemma() -> nn.Module:
    """An encoder-decoder that classifies, and takes no `use_cache`."""
    from transformers import T5GemmaConfig, T5GemmaForSequenceClassification, T5GemmaModuleConfig

    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 4}
    half = T5GemmaModuleConfig(**sizes)
    config = T5GemmaConfig(encoder=half, decoder=half, num_labels=3, attn_implementation="eager")
    model: nn.Module = T5GemmaForSequenceClassification(config)
    return model.eval()


def bart_decoder() -> nn.Module:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    model: nn.Module = BartForCausalLM(BartConfig(vocab_size=VOCAB, **sizes, dropout=0.0))
    return model


def biogpt() -> nn.Module:
    from transformers import BioGptConfig, BioGptForTokenClassification

    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0}
    model: nn.Module = BioGptForTokenClassification(BioGptConfig(**SIZES, **drops, num_labels=VOCAB))
    return model


def with_labels(labels: Tensor) -> dict[str, Tensor]:
    return {**padded(), "labels": labels}


CLASS = torch.tensor([0, 2, 1, 2])
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], float]] = {
    "causal": (llama, padded(), 11.0),
    "causal, by its own name": (gpt2, padded(), 11.0),
    "experts with a balancing loss": (mixture, padded(), 11.0),
    "masked": (lambda: bert("BertForMaskedLM"), padded(), 15.0),
    "tokens": (lambda: bert("BertForTokenClassification", num_labels=VOCAB), padded(), 15.0),
    "encoder and decoder": (t5, padded(), 15.0),
    "a decoder whose labels are moved before": (bart_decoder, padded(), 15.0),
    "tokens, without those that are masked": (biogpt, with_labels(padded()["input_ids"]), 15.0),
    "a class": (lambda: bert("BertForSequenceClassification", num_labels=3), with_labels(CLASS), 4.0),
    "a class, by an encoder and decoder": (t5gemma, with_labels(CLASS), 4.0),
    "a value": (lambda: bert("BertForSequenceClassification", num_labels=1), with_labels(CLASS / 2), 4.0),
    "classes": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        with_labels(F.one_hot(CLASS, 3).double()),
        12.0,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers(name: str) -> None:
    made, batch, counted = MODELS[name]
    torch.manual_seed(0)
    model = made()
    if name == "causal":
        model.double()
    total, weight = piper.losses.huggingface(model, batch)
    assert weight.item() == counted
    given = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    torch.testing.assert_close((total / weight).float(), model(**given).loss.float(), rtol=1e-5, atol=1e-6)


def test_logits_are_not_copied_to_shift_them() -> None:
    """A part of the logits is a copy of nearly all of them; the labels are moved instead."""
    seen: list[Tensor] = []

    class Fixed(nn.Module):
        loss_type = "ForCausalLM"

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:  # noqa: ANN401
            seen.append(torch.zeros(2, 5, 7, requires_grad=True))
            return type("Out", (), {"logits": seen[0]})

    tokens = torch.randint(7, (2, 5))
    total, weight = piper.losses.huggingface(Fixed(), {"input_ids": tokens, "labels": tokens})
    assert weight.item() == 8.0
    flat = total.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
    assert type(flat).__name__ in ("ViewBackward0", "UnsafeViewBackward0"), "a view, not a slice and a copy"


def test_models_without_such_a_loss_and_batches_without_labels_are_refused() -> None:
    class Detector(nn.Module):
        loss_type = "ForObjectDetection"

        def forward(self, x: Tensor) -> Any:  # noqa: ANN401
            return type("Out", (), {"logits": x})

    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"no \(sum, weight\) form of the loss of Detector"):
        piper.losses.huggingface(Detector(), {"x": x, "labels": x})
    with pytest.raises(ConfigError, match="the batch has no labels\n  fields: x"):
        piper.losses.huggingface(Detector(), {"x": x})


def test_a_loss_of_transformers_that_its_class_alone_knows_is_refused() -> None:
    sentence = {"input_ids": torch.ones(4, 5, dtype=torch.long), "labels": torch.tensor([0, 1, 1, 0])}
    with pytest.raises(ConfigError, match="form of the loss of BertForNextSentencePrediction"):
        piper.losses.huggingface(bert("BertForNextSentencePrediction"), sentence)
    with pytest.raises(ConfigError, match="more labels: entity_labels"):
        piper.losses.huggingface(llama(), {**padded(), "entity_labels": padded()["labels"]})


def hugging_job(loss: Callable[[nn.Module, Mapping[str, Tensor]], Any]) -> piper.Job:
    return piper.Job(
        model=llama,
        loss=loss,
        data=lambda: [padded(seed) for seed in range(2)],
        strategy=[piper.replicate(piper.at(), [0, 1]), piper.split(piper.at(), parts=2)],
        precision="fp64",
    )


def test_transformers_own_mean_fails_the_check_and_ours_passes() -> None:
    def mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss

    job = hugging_job(mean)
    program = compile(job, device="cpu")
    report = check(program, launch_inline, [*job.data()])
    assert not report.ok
    assert "the loss is a mean of uneven slices: nll_loss_forward of the loss" in str(report.first_bad)
    assert "divides by 1, 2, 3, 5 on the slices; return (sum, weight)" in str(report.first_bad)
    (warning,) = program.warnings
    assert warning.startswith(
        "the loss is a mean that divides by a number of the data: cross_entropy (loss_utils.py:"
    )

    job = hugging_job(piper.losses.huggingface)
    program = compile(job, device="cpu")
    report = check(program, launch_inline, [*job.data()])
    assert report.ok, report
    assert program.warnings == ()
    (note,) = report.notes  # its norms compute in float32, whose rounding depends on the size of a slice
    assert note.startswith("these operations compute in float32: bmm of model.rotary_emb (modeling_llama.py:")
    assert "Their rounding depends on the size of a slice. The whole batch agrees to " in note


# Which losses may be uneven.


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def tokens_mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def by_hand(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    kept = (batch["y"] != -100).to(batch["x"].dtype)
    out: Tensor = model(batch["x"])
    return (out.square().mean(-1) * kept).sum() / kept.sum().clamp(min=1)


def selected(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return out[batch["y"] >= 0].square().mean()


def class_weights(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    weight = torch.arange(1.0, 6.0, dtype=batch["x"].dtype, device=batch["x"].device)
    return F.cross_entropy(model(batch["x"][:, 0]), batch["y"][:, 0], weight=weight)


def one_label(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"][:, 0]), batch["y"][:, 0])


def plain_mean(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return ((out - out.mean(-1, keepdim=True)) / out.std(-1, keepdim=True)).square().mean() / 2


def with_weight(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(batch["x"]), batch["y"])


def scaled(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.square().sum() / out.detach().square().sum()


SPLIT = [piper.split(piper.at(), parts=2)]


def labels_kept(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    kept = batch["y"] > 0  # how many is known in a step only
    return F.cross_entropy(model(batch["x"])[kept], batch["y"][kept])


@pytest.mark.parametrize(
    ("loss", "strategy", "warned"),
    [
        (tokens_mean, SPLIT, "cross_entropy"),
        (tokens_mean, [piper.replicate(piper.at(), [0, 1])], "cross_entropy"),
        (tokens_mean, [], None),
        (by_hand, SPLIT, "division"),
        (selected, SPLIT, "mean"),
        (class_weights, SPLIT, "cross_entropy"),
        (labels_kept, SPLIT, "cross_entropy"),
        (one_label, SPLIT, None),
        (plain_mean, SPLIT, None),
        (with_weight, SPLIT, None),
        (scaled, SPLIT, None),
    ],
)
def test_a_mean_that_may_be_uneven_is_warned_of(
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Any], strategy: list[Any], warned: str | None
) -> None:
    batch = {"x": torch.randn(4, 3, 4), "y": torch.randint(5, (4, 3))}
    program = compile(
        piper.Job(model=Table, loss=loss, data=lambda: [batch], strategy=strategy), device="cpu"
    )
    if warned is None:
        assert program.warnings == ()
    else:
        (text,) = program.warnings
        assert text.startswith(
            f"the loss is a mean that divides by a number of the data: {warned} (test_losses.py:"
        )


def contrastive(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    a, b = F.normalize(model(batch["x"]), dim=-1), F.normalize(batch["y"], dim=-1)
    logits = a @ b.T
    return F.cross_entropy(logits, torch.arange(len(a))) + F.cross_entropy(logits.T, torch.arange(len(a)))


def distances(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    loss: Tensor = torch.cdist(out, out).relu().mean()
    return loss


def two_views(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    both = torch.cat([model(batch["x"]), model(batch["y"])])
    return (both[:, None] - both).square().sum(-1).exp().sum(), torch.tensor(float(len(both)))


def of_features(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return (out[:, :, None] * out[:, None, :]).mean(0).square().mean()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("loss", "warned"),
    [(contrastive, "matmul"), (distances, "cdist"), (two_views, "sum"), (of_features, None)],
)
def test_a_loss_that_compares_samples_is_warned_of_where_the_batch_is_sliced(
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Any], warned: str | None, parts: int
) -> None:
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    job = piper.Job(
        model=lambda: nn.Linear(4, 4),
        loss=loss,
        data=lambda: [batch],
        strategy=[piper.split(piper.at(), parts=parts)] if parts > 1 else [],
    )
    program = compile(job, device="cpu")
    if warned is None or parts == 1:
        assert program.warnings == ()
    else:
        (text,) = program.warnings
        assert text.startswith(f"the loss compares samples with each other: {warned} (test_losses.py:")


@pytest.mark.parametrize(
    ("model", "loss", "traced"),
    [
        (lambda: nn.Linear(4, 2), lambda model, batch: model(batch["x"]).relu().mean(), [2]),
        (lambda: nn.Linear(4, 2), lambda model, batch: (model(batch["x"]) @ torch.ones(2, 2)).mean(), [2, 8]),
        (
            lambda: nn.Linear(4, 2),
            lambda model, batch: (model(batch["x"])[:, :1] + batch["y"][:, 0]).mean(),
            [2, 8],
        ),
        (
            lambda: nn.Linear(4, 4),
            lambda model, batch: F.linear(model(batch["x"]), batch["y"]).mean(),
            [2, 8],
        ),
    ],
    ids=["features", "an operation that may compare", "a sum of pairs", "weights of the batch"],
)
def test_the_batch_is_traced_where_a_square_matrix_may_be_of_pairs_of_samples(
    model: Callable[[], nn.Module], loss: Callable[[nn.Module, Mapping[str, Tensor]], Any], traced: list[int]
) -> None:
    """Slices have two samples, as many as a layer has features in the first case."""
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    strategy = [piper.split(piper.at(), parts=4)]
    job = piper.Job(model=model, loss=loss, data=lambda: [batch], strategy=strategy)
    assert sorted(compile(job, device="cpu").recordings.recorded) == traced


# Losses that are sums. Each has `out` [samples, 3, 5], and `y` [samples, 3] of classes.

SUMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "cross entropy": lambda _, out, y: F.cross_entropy(out.mT, y, reduction="sum"),
    "a share": lambda _, out, y: 0.5 * F.cross_entropy(out.mT, y, reduction="sum"),
    "a fixed divisor": lambda _, out, y: F.cross_entropy(out.mT, y, reduction="sum") / 4,
    "a module": lambda _, out, y: nn.MSELoss(reduction="sum")(out, torch.zeros_like(out)),
    "squares": lambda _, out, y: out.square().sum(),
    "means of samples": lambda _, out, y: torch.sum(out.square().mean(-1)),
    "a term": lambda _, out, y: out.square().mean() + 0.1 * out.abs().sum(),
    "steps": lambda _, out, y: sum(F.cross_entropy(out[:, i], y[:, i], reduction="sum") for i in range(3)),
    "dot": lambda _, out, y: torch.dot(out.flatten(), out.flatten()),
    "product of vectors": lambda _, out, y: out.flatten() @ out.flatten().sin() / 8,
    "letters": lambda _, out, y: 0.5 * torch.einsum("bsd,bsd->", out, out),
    "vecdot": lambda _, out, y: torch.linalg.vecdot(out, out).sum(),
    "product and sum": lambda _, out, y: (out * out.sin()).sum() / 7,
    "by hand": lambda _, out, y: -(out.log_softmax(-1) * F.one_hot(y, 5)).sum(),
}
MEANS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "by the samples": lambda _, out, y: F.cross_entropy(out.mT, y, reduction="sum") / len(y),
    "by the elements": lambda _, out, y: out.square().sum().div(out.numel()),
    "times a share": lambda _, out, y: out.square().sum() * (1 / out.numel()),
    "of a tensor": lambda _, out, y: out.square().sum() * out.new_tensor(1 / len(out)),
    "elements divided": lambda _, out, y: (out.square() / len(out)).sum(),
    "of sums": lambda _, out, y: out.square().sum(-1).mean(),
    "a sum of means": lambda _, out, y: out.square().mean(0).sum(),
    "a penalty": lambda net, out, y: out.square().mean() + sum(p.square().sum() for p in net.parameters()),
    "shares of samples": lambda _, out, y: (out.mean((1, 2)).softmax(0) * out.mean((1, 2))).sum(),
    "shares of all": lambda _, out, y: (out.mean(-1).flatten().softmax(-1) * y.flatten()).sum(),
    "a product of means": lambda _, out, y: torch.dot(out.mean((0, 1)), out.mean((0, 1))),
    "weighted by shares": lambda _, out, y: out.mean((1, 2)) @ out.new_full((len(out),), 1 / len(out)),
    "selected": lambda _, out, y: (out.square().mean(-1) * (y > 1) / (y > 1).sum()).sum(),
    "a sum with its weight": lambda _, out, y: (out.square().sum(), (y > -1).sum()),
    "batchmean": lambda _, out, y: F.kl_div(out.log_softmax(-1), out.softmax(-1), reduction="batchmean"),
}
FEW = ["cross entropy", "a fixed divisor", "dot", "by the samples", "a product of means", "a penalty"]


def of_table(made: Callable[[nn.Module, Tensor, Tensor], Any], strategy: list[piper.Directive]) -> piper.Job:
    batch = {"x": torch.randn(8, 3, 4), "y": torch.randint(5, (8, 3))}
    return piper.Job(
        model=Table,
        loss=lambda model, given: made(model, model(given["x"]), given["y"]),
        data=lambda: [batch],
        strategy=strategy,
    )


def shortened(names: Mapping[str, object]) -> list[Any]:
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", shortened(SUMS))
def test_a_loss_that_adds_up_samples_is_refused_where_batches_are_sliced(name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        compile(of_table(SUMS[name], [piper.replicate(piper.at(), [0, 1]), *SPLIT]), device="cpu")
    assert "the loss is a sum over samples, and the slices of a batch are averaged" in str(caught.value)
    assert "(test_losses.py:" in caught.value.facts["sum"]
    assert caught.value.facts["slices"] == "4 of 2 samples each, whose mean is 1/4 of the sum"
    assert len(compile(of_table(SUMS[name], []), device="cpu").plans) == 1, "on one device it is what it is"


@pytest.mark.parametrize("name", shortened(MEANS))
def test_a_mean_written_as_a_sum_is_not_refused(name: str) -> None:
    compile(of_table(MEANS[name], [piper.replicate(piper.at(), [0, 1]), *SPLIT]), device="cpu")


RECIPE = """
import piper, torch
from tests.test_losses import Table, tokens_mean, with_weight

BATCH = {"x": torch.randn(4, 3, 4), "y": torch.randint(5, (4, 3))}


def wrong() -> piper.Job:
    split = [piper.split(piper.at(), parts=2)]
    return piper.Job(model=Table, loss=tokens_mean, data=lambda: [BATCH], strategy=split, steps=1)


def right() -> piper.Job:
    split = [piper.split(piper.at(), parts=2)]
    return piper.Job(model=Table, loss=with_weight, data=lambda: [BATCH], strategy=split, steps=1)
"""


def test_train_and_plan_print_the_warning_once(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    printed = {}
    for name in ("wrong", "right"):
        console = Console(file=io.StringIO(), soft_wrap=True, markup=False, highlight=False)
        asked = TrainOptions(
            recipe=f"{tmp_path}/recipe.py:{name}", on="inline", out=tmp_path / name, device="cpu"
        )
        train_recipe(asked, console)
        print_plan(compile(load_recipe(asked.recipe), device="cpu"), console, device=None, why=False)
        assert isinstance(console.file, io.StringIO)
        printed[name] = [line for line in console.file.getvalue().splitlines() if "Warning" in line]
    assert printed["right"] == []
    assert len(printed["wrong"]) == 2, "one of train, one of plan"
    for line in printed["wrong"]:
        assert line.startswith(
            "Warning: the loss is a mean that divides by a number of the data: cross_entropy ("
        )
        assert line.endswith("Return (sum, weight): see piper.losses")
